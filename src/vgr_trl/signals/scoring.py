"""Score completions without gradients: log-probabilities, entropies, hidden states, values and attention.

`score` is the one scoring function, of the trainer and of the public `RolloutScorer`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from vgr_trl.pixels import image_inputs_of, number_images
from vgr_trl.scoring_inputs import take_scoring_rows
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.head import Head, read_hidden_states
from vgr_trl.signals.probe import AttentionProbe, SimilarityProbe
from vgr_trl.signals.ratios import AttentionMass, build_modality_masks, join_masses


@dataclass(frozen=True)
class AttentionPlan:
    """Attention to be measured by a scoring pass.

    Attributes:
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        mass: whether the attention mass is measured.
        region: (N, P) bool, vision tokens whose attention is measured apart; None: none.
        keep_rows: rows of which attention over the vision tokens is kept token by token.
        keep_layers: of the layers with attention, those it is kept of; None: all.
        measure_prompt: whether the prompt's instruction tokens are measured as queries too.
        similarity: layer and pooling of `SimilarityProbe`; None: hidden states are not compared with the image.
        per_image: whether the attention on each image is measured apart.
    """

    vision_token_ids: Sequence[int]
    special_token_ids: Sequence[int] = ()
    mass: bool = True
    region: Tensor | None = None
    keep_rows: Sequence[int] = ()
    keep_layers: Sequence[int] | None = None
    measure_prompt: bool = False
    similarity: tuple[int, str] | None = None
    per_image: bool = False


@dataclass(frozen=True)
class Want:
    """Quantities to read off a scoring pass beside log-probabilities.

    Attributes:
        entropies: entropies of the distributions that tokens are drawn from.
        hidden: hidden states of the emitting positions.
        values: head of a critic, which maps hidden states (N, T, D) to values (N, T); None: no values.
        attention: attention to measure; None: none.
    """

    entropies: bool = False
    hidden: bool = False
    values: Callable[[Tensor], Tensor] | None = None
    attention: AttentionPlan | None = None


@dataclass(frozen=True)
class Scores:
    """Result of a scoring pass over N completions of T tokens; a field is None unless it was wanted.

    Attributes:
        logps: (N, T), log-probabilities of the tokens.
        mask: (N, T) bool, tokens that count.
        entropies: (N, T), in nats.
        hidden: (N, T, D), of the positions that emit the tokens.
        values: (N, T).
        attention: attention mass (L, N, T), whose mask is `mask`.
        prompt_attention: that of the prompt's instruction tokens, (L, N, 1).
        maps: row -> attention over its vision tokens, (layers, T, V).
        similarity: (N, T) float32.
        per_image: per row, the attention on each of its images in [0, 1], None where it is undefined or unknown.
    """

    logps: Tensor
    mask: Tensor
    entropies: Tensor | None = None
    hidden: Tensor | None = None
    values: Tensor | None = None
    attention: AttentionMass | None = None
    prompt_attention: AttentionMass | None = None
    maps: Mapping[int, Tensor] | None = None
    similarity: Tensor | None = None
    per_image: list[list[float | None]] | None = None


# (model, inputs, whether entropies are wanted) -> log-probabilities and entropies (N, T) of the completions
Compute = Callable[[nn.Module, dict[str, Any], bool], tuple[Tensor, Tensor | None]]


@torch.no_grad()
def score(
    model: nn.Module,
    batch: Mapping[str, Any],
    want: Want,
    *,
    compute: Compute | None = None,
    rows_per_pass: int | None = None,
    temperature: float = 1.0,
) -> Scores:
    """Score completions in passes without gradients, and read off them whatever else is wanted.

    Args:
        model: transformers model, also wrapped.
        batch: `input_ids` and `attention_mask` (N, P + T), `logits_to_keep` T, token types, the pixel inputs of the N
            rows, and where they pass in parts `num_images` and `num_tiles` of each row. With tools, `tool_mask` (N, T)
            is 0 for their tokens: these do not count, their images are vision and their texts instruction.
        want: what is returned beside log-probabilities.
        compute: runs one forward pass, as TRL's trainer does. None: the base model runs, and `Head` scores its hidden
            states.
        rows_per_pass: rows that pass at a time; None: all.
        temperature: logits are divided by it, where `compute` is None.

    Raises:
        DataError: pixel inputs cannot be assigned to the rows of a part.
        ConfigError: the attention of the model cannot be measured.
    """
    count, length = len(batch["input_ids"]), batch["logits_to_keep"]
    step, parts = rows_per_pass or count, []
    for start in range(0, count, step):
        rows = range(start, min(start + step, count))
        inputs = take_scoring_rows(batch, rows)
        own = inputs.pop("tool_mask", None)
        mask = inputs["attention_mask"][:, -length:].bool()  # (B, T)
        mask = mask if own is None else mask & own.bool()
        probe, similar = _build_probes(model, inputs, want.attention, rows, own)
        reads = want.hidden or want.values or compute is None
        with ExitStack() as stack:
            states = stack.enter_context(read_hidden_states(model, length)) if reads else []
            stack.enter_context(probe or nullcontext())
            stack.enter_context(similar or nullcontext())
            if compute is not None:
                logps, entropies = compute(model, inputs, want.entropies)
            else:
                names = inputs.keys() - {"logits_to_keep", "num_images", "num_tiles"}
                causal_model(model).base_model(**{name: inputs[name] for name in names}, use_cache=False)
        if compute is None:
            head, tokens = Head(causal_model(model)), inputs["input_ids"][:, -length:]
            logps, entropies = head.score(states[0], tokens, mask, temperature)
        found: dict[str, Any] = {"logps": logps, "mask": mask, "entropies": entropies if want.entropies else None}
        found |= {"hidden": states[0] if want.hidden else None, "values": want.values and want.values(states[0])}
        if probe is not None:
            found["attention"] = replace(probe.mass, mask=mask, **({} if own is None else _seen(probe.sets, length)))
            if want.attention is not None and want.attention.per_image:
                found["per_image"] = _per_image(probe, mask, want.attention.keep_layers, inputs.get("num_images"))
            found["prompt_attention"] = probe.prompt_mass if probe.plan.measure_prompt else None
            found["maps"] = {rows[row]: kept for row, kept in probe.kept.items()}
        parts.append(Scores(**found, similarity=None if similar is None else similar.similarity))
    return parts[0] if len(parts) == 1 else _join(parts)


def _build_probes(
    model: nn.Module, inputs: Mapping[str, Any], plan: AttentionPlan | None, rows: range, own: Tensor | None
) -> tuple[AttentionProbe | None, SimilarityProbe | None]:
    """Return the probes of a pass over these rows of the batch; `own`, (B, T), is 0 for the tokens of tools."""
    if plan is None:
        return None, None
    prompt = inputs["input_ids"].size(1) - inputs["logits_to_keep"]
    stop = prompt if own is None else None
    ids, given = inputs["input_ids"][:, :stop], given_tokens(inputs, own)[:, :stop]
    masks = build_modality_masks(
        ids, given, vision_token_ids=plan.vision_token_ids, special_token_ids=plan.special_token_ids
    )
    whole = None if own is None else prompt  # P, where masks are of whole rows
    similar = None if plan.similarity is None else SimilarityProbe(model, masks.vision, *plan.similarity, whole)
    if not plan.mass:
        return None, similar
    if plan.per_image:
        numbers = number_images(image_inputs_of(inputs), inputs.get("num_images") or [], masks.vision)  # (B, P or S)
        most = torch.arange(1, max(inputs.get("num_images") or [0]) + 1, device=masks.vision.device)
        masks.images = numbers.unsqueeze(-1) == most
    if plan.region is not None:
        masks.region = plan.region[rows.start : rows.stop].to(masks.vision) & masks.vision
    keep = [row - rows.start for row in plan.keep_rows if row in rows]
    return AttentionProbe(model, masks, None, keep, plan.measure_prompt, plan.keep_layers, prompt=whole), similar


def given_tokens(inputs: Mapping[str, Any], own: Tensor | None) -> Tensor:
    """Return the tokens that the policy has not written, (N, P + T) bool: those of prompts and of tools."""
    given, length = inputs["attention_mask"].bool(), inputs["logits_to_keep"]
    of_tools = torch.zeros_like(given[:, -length:]) if own is None else given[:, -length:] & ~own.bool()
    return torch.cat([given[:, :-length], of_tools], dim=1)


def _seen(sets: Tensor, length: int) -> dict[str, Tensor]:
    """Return how many vision and instruction tokens of whole rows (N, S, 2 or more) each of T tokens sees."""
    seen = sets[..., :2].cumsum(1)[:, -length - 1 : -1].int()  # (N, T, 2)
    return {"seen_vision": seen[..., 0], "seen_instruction": seen[..., 1]}


def _per_image(
    probe: AttentionProbe, mask: Tensor, layers: Sequence[int] | None, num_images: Sequence[int] | None
) -> list[list[float | None]]:
    """Return the attention on each image, the mean over layers and over the tokens that count and come after it.

    Args:
        mask: (N, T) bool, tokens that count.
    """
    mass = probe.image_mass if layers is None else probe.image_mass[list(layers)]
    images = probe.sets[..., probe.sides :].cumsum(1)  # (N, P or S, K)
    seen = images[:, [min(position, images.size(1) - 1) for position in probe.plan.positions]]  # (N, T, K)
    after = mask.unsqueeze(-1) & (seen > 0) & (seen == images[:, -1:])
    means = ((mass.mean(0) * after).sum(1) / after.sum(1)).tolist()  # (N, K)
    return [
        [None if value != value else value for value in row[:count]]
        for row, count in zip(means, num_images or [0] * len(means), strict=True)
    ]


def _join(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all rows of the parts, in which the same was wanted."""
    found: dict[str, Any] = {}
    for name, first in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if isinstance(first, AttentionMass):
            found[name] = join_masses(values)
        elif isinstance(first, Tensor):
            found[name] = torch.cat(values)
        elif isinstance(first, list):
            found[name] = [row for value in values for row in value]
        elif first is not None:
            found[name] = {row: kept for value in values for row, kept in value.items()}
    return Scores(**found)


def policy_is_active(model: torch.nn.Module) -> bool:
    """Whether the adapters of `model`, if it has any, are those being trained: not switched off, not a reference."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            return module.has_active_enabled_adapter and "ref" not in module.active_adapters
    return True
