"""How much a model looks at the image while it answers, for benchmarks that compare trained models."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vgr_trl.data.images import images_of
from vgr_trl.evaluation import CompletionGenerator, build_conversation
from vgr_trl.signals import RolloutScorer, blacken_patches, split_layers, vision_gain_ratio, visual_dependency
from vgr_trl.signals.ratios import special_token_ids


def looks(
    model: Any, processor: Any, rows: Sequence[Mapping[str, Any]], max_completion_length: int
) -> tuple[float, float]:
    """Return the mean late VGR of one sampled answer to each row, and its mean dependency per token on the image."""
    model.eval()
    torch.manual_seed(1)
    generator = CompletionGenerator(model, processor, max_completion_length)
    scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
    shown = [rows, [blackened(row) for row in rows]]
    prompts: list[Any] = [
        generator.encode_prompts([build_conversation(row, False, None) for row in each]) for each in shown
    ]
    ids, mask = tokenised([text for (text,) in generator.sample(prompts[0], 1, 1.0)], processor)
    clean, perturbed = (
        scorer.score(
            inputs.pop("input_ids"), inputs.pop("attention_mask"), ids.to(model.device), mask.to(model.device), **inputs
        )
        for inputs in prompts
    )
    assert clean.attention is not None
    late = vision_gain_ratio(clean.attention, split_layers(len(clean.attention.vision))["late"])
    dependency = visual_dependency(clean.logps, perturbed.logps)[mask.bool()]
    return float(late.nanmean()), float(dependency.mean())


def blackened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with half of the patches of its images black, the same ones whenever it is asked for."""
    seed = zlib.crc32(str(row["id"]).encode())
    kept = {name: value for name, value in row.items() if name != "image"}
    return kept | {"images": [blacken_patches(image, seed=seed) for image in images_of(row)]}


def tokenised(texts: list[str], processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return completions and their mask, (N, T), padded on the right, each with its end."""
    tokenizer = processor.tokenizer
    rows = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask
