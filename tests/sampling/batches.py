"""Rollout batches as TRL 1.16 makes them, with drawn numbers in place of a model's."""

from typing import Any

import torch

from vgr_trl.batch import Placement
from vgr_trl.rollout import GroupSelection, Rollout
from vgr_trl.sampling.replay import Group, cut_groups, insert_groups
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import AttentionMass
from vgr_trl.trl_bridge import from_trl

PAD = 9
FAMILIES = ("qwen", "lfm2", "idefics")


def rollout_of(batch, *, rewards=None, advantages=None, signals=None) -> Rollout:
    batch = from_trl(batch)
    advantages = batch.advantages if advantages is None else advantages
    rewards = torch.zeros(len(advantages)) if rewards is None else rewards
    rollout = Rollout([], signals=signals)
    rollout.batch = batch
    rollout.selection = GroupSelection(Placement(len(batch), 2), rewards, rewards, advantages)
    return rollout


def cut(batch, wanted, **options) -> list[Group]:
    return cut_groups(rollout_of(batch, **options), wanted, PAD, step=0)


def write(batch, replacements, **options) -> Rollout:
    rollout = rollout_of(batch, **options)
    insert_groups(rollout, replacements, lambda local: torch.stack([local, local + 100]), PAD)
    return rollout


def draw_batch(
    seed: int, images: list[int | None], *, prompts: int = 5, completions: int = 4,
    family: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Prompts with so many images, with two completions each; the longest of `prompts` and `completions` tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(images) * 2
    lengths = torch.randint(1, completions + 1, (rows,), generator=draw)
    lengths[rows // 2] = completions
    widths = torch.randint(2, prompts + 1, (len(images),), generator=draw)
    widths[-1] = prompts
    prompt_mask = (torch.arange(prompts) >= prompts - widths[:, None]).long().repeat_interleave(2, 0)  # (N, P)
    completion_mask = (torch.arange(completions) < lengths[:, None]).long()  # (N, T)
    ids = torch.randint(10, 99, (len(images), prompts), generator=draw).repeat_interleave(2, 0)
    batch: dict[str, Any] = {
        "prompt_ids": ids.where(prompt_mask == 1, PAD),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(10, 99, (rows, completions), generator=draw).where(completion_mask == 1, PAD),
        "completion_mask": completion_mask,
        "advantages": torch.randn(rows, generator=draw),
        "num_items_in_batch": completion_mask.sum(),
        "old_per_token_logps": torch.randn(rows, completions, generator=draw) * completion_mask,
    }
    if family is not None:
        drawn = [one_image(family, seed * 100 + prompt, count or 0) for prompt, count in enumerate(images)]
        parts = [part for part in drawn for _ in range(2)]
        batch |= {name: _padded([part[name] for part in parts]) for name in parts[0]}  # as the processors do
        batch["num_images"] = [count or 0 for count in images for _ in range(2)]
        if family == "lfm2":
            batch["num_tiles"] = [len(part["pixel_values"]) for part in parts]
        if family == "qwen":
            types = torch.randint(0, 2, (len(images), prompts), generator=draw).repeat_interleave(2, 0) * prompt_mask
            batch["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(completion_mask)], dim=1)
    return batch


def one_image(family: str, seed: int, count: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    def number(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float32).to(torch.bfloat16)

    if family == "qwen":
        grid = torch.tensor([[1, 2 * size(1, 2), 2 * size(1, 3)] for _ in range(count)]).view(count, 3)
        return {"pixel_values": number(int(grid.prod(-1).sum()), 6), "image_grid_thw": grid}
    if family == "lfm2":
        tiles, patches = count * size(1, 2), size(2, 5)
        shapes = torch.full((tiles, 2), patches)
        mask = torch.ones(tiles, patches, dtype=torch.int32)
        return {"pixel_values": number(tiles, patches, 6), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    height = size(3, 5)  # Idefics: one entry per row, padded to the most images and the largest
    mask = torch.ones(1, max(count, 1), height, 4, dtype=torch.bool)
    pixels = number(1, max(count, 1), 3, height, 4)
    return {"pixel_values": pixels * bool(count), "pixel_attention_mask": mask & bool(count)}


def _padded(parts: list[torch.Tensor]) -> torch.Tensor:
    filled = [part for part in parts if len(part)] or parts
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in filled), strict=True)]
    grown = []
    for part in filled:
        grown.append(part.new_zeros(len(part), *shape))
        grown[-1][tuple(slice(size) for size in part.shape)] = part
    return torch.cat(grown)


def draw_signals(seed: int, batch: dict[str, Any]) -> RolloutSignals:
    draw = torch.Generator().manual_seed(seed)
    mask = batch["completion_mask"].bool()
    vision, instruction = torch.rand(2, 3, *mask.shape, generator=draw)
    counts = torch.randint(1, 9, (2, len(mask)), generator=draw)
    logps, entropies, dependency = torch.rand(3, *mask.shape, generator=draw)
    return RolloutSignals(-logps, entropies, mask, AttentionMass(vision, instruction, *counts, mask), dependency)
