"""Completions of tiny models by continuous batching, as the engine of training generates them, and by `generate`."""

from contextlib import nullcontext

import torch
from support.models.families import CLOSE, EOS, IMAGE, OPEN, PAD, PIXEL_INPUTS, VIDEO, make_batch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from vgr_trl.batching import generate_batch, looking_up, make_requests

MARKS = [IMAGE, OPEN, CLOSE, VIDEO]  # suppressed, as TRL suppresses image tokens
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 1.0}


def as_trl_has_it(prompts):
    """The tokens of each row without padding, and the processor's further outputs."""
    kept = prompts["attention_mask"].bool()
    names = [name for name in prompts if name not in ("input_ids", "attention_mask")]
    fields = {name: prompts[name] for name in names}
    rows = {
        name: [row[mask].tolist() for row, mask in zip(prompts[name], kept, strict=True)]
        for name in ("input_ids", *(name for name in names if name not in PIXEL_INPUTS))
    }
    return rows.pop("input_ids"), fields | rows


def batched(model, ids, fields, *, length=12, pages=None, **options):
    """Tokens and log-probabilities of a completion of each row."""
    # `sdpa`, as a checkpoint has it
    given = {"eos_token_id": EOS, "pad_token_id": PAD, "suppress_tokens": MARKS, **SAMPLED, **options}
    config = GenerationConfig(max_new_tokens=length, **given)
    sizes = {"page_size": 8, "num_blocks": 200, "max_batch_tokens": 2048, **(pages or {})}
    pages = ContinuousBatchingConfig(return_logprobs=True, **sizes)
    with torch.no_grad():
        requests = make_requests(model, ids, fields)
        with looking_up(model, requests, nullcontext):
            return requests, *generate_batch(model, requests, config, pages)


def largest_distance(model, family, prompts, completions, logps):
    """Largest distance of returned log-probabilities from those of a plain pass with pixels."""
    width = max(map(len, completions))
    filled = [row + [PAD] * (width - len(row)) for row in completions]
    ids = torch.cat([prompts["input_ids"], torch.tensor(filled)], dim=1)
    own = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in completions])
    mask = torch.cat([prompts["attention_mask"], own], dim=1)
    types = {kind: torch.nn.functional.pad(prompts[kind], (0, width)) for kind in family.per_token}
    with torch.no_grad():
        logits = model(**{**prompts, "input_ids": ids, "attention_mask": mask, **types}).logits[:, -width - 1 : -1]
    logits[..., MARKS] = -torch.inf
    scored = logits.log_softmax(-1).gather(-1, ids[:, -width:, None])[..., 0]
    return max(
        (row[: len(given)] - torch.tensor(given)).abs().max().item() for row, given in zip(scored, logps, strict=True)
    )


def greedy_equals(model, prompts, length=12):
    """Whether greedy completions equal those of `generate`."""
    options = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD, "suppress_tokens": MARKS}
    with torch.no_grad():
        plain = model.generate(**prompts, max_new_tokens=length, **options)[:, prompts["input_ids"].size(1) :]
    expected = [row[: row.index(EOS) + 1] if EOS in row else row for row in plain.tolist()]
    ids, fields = as_trl_has_it(prompts)
    greedy = batched(model, ids, fields, length=length, do_sample=False, top_k=None, temperature=None)[1]
    return greedy == expected


def prompts_of(name, images=(1, 2), **options):
    return make_batch(name, images=images, **options).prompt_inputs()
