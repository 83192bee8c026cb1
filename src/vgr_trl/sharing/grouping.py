"""Which rows share a prompt, where a batch is cut into prompt and rest, and which rows pass or are trained together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS
from vgr_trl.batch.row_images import owned

# Losses that divide by something that does not depend on which rows share a micro-batch (read in TRL 1.16, and tested).
REGROUPABLE_LOSSES = frozenset({"dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"})
# Tokens that a device computes in the time that a pass of its own takes more than a part of one.
_OF_A_PASS = {"cpu": 32}
_ON_OTHERS = 256


def find_groups(
    ids: torch.Tensor, mask: torch.Tensor | None = None, pixels: Sequence[Sequence[torch.Tensor]] | None = None
) -> list[int]:
    """Number of the group of each row: rows with equal tokens, mask and pixels; groups in order of first appearance.

    Args:
        ids: (N, P) tokens of the prompts.
    """
    texts = ids.tolist() if mask is None else torch.stack([ids, mask.to(ids.dtype)], dim=1).flatten(1).tolist()
    candidates: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # text -> (group, its first row)
    groups: list[int] = []
    count = 0
    for row, text in enumerate(texts):
        known = candidates.setdefault(tuple(text), [])
        group = next((group for group, first in known if pixels is None or _equal(pixels[first], pixels[row])), None)
        if group is None:
            group, count = count, count + 1
            known.append((group, row))
        groups.append(group)
    return groups


def first_rows(groups: Sequence[int]) -> list[int]:
    """The first row of each group, in the order of the groups."""
    return [row for row, group in enumerate(groups) if group not in groups[:row]]


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(some, others, strict=True))


def best_split(
    ids: torch.Tensor,
    mask: torch.Tensor,
    pixels: Sequence[Sequence[torch.Tensor]] | None,
    earliest: int,
    latest: int | None = None,
) -> int | None:
    """Where to cut a batch whose prompt lengths are not known, so that the fewest tokens are computed.

    Args:
        pixels: per row, its pixel inputs; rows with different ones share nothing.
        earliest: first column at which the batch may be cut, at least 1.
        latest: last such column, below S. None: S - 1.

    Returns:
        The number of columns p in [earliest, latest] with the largest p * (N - number of different rows in columns
        [0, p)), or None if no two rows agree up to `earliest`.
    """
    length = ids.size(1)
    latest = length - 1 if latest is None else latest
    shared = []  # per row but the first: columns it has in common with some earlier row
    for row in range(1, len(ids)):
        differs = (ids[:row] != ids[row]) | (mask[:row] != mask[row])  # (row, S)
        common = torch.where(differs.any(-1), differs.int().argmax(-1), length).tolist()  # (row,)
        agreeing = [
            columns for earlier, columns in enumerate(common) if pixels is None or _equal(pixels[earlier], pixels[row])
        ]
        shared.append(min(max(agreeing, default=0), latest))
    cuts = {cut for cut in shared if cut >= earliest}
    return max(cuts, key=lambda cut: cut * sum(other >= cut for other in shared), default=None)


def whole_groups(batch_size: int, num_generations: int) -> int:
    """The smallest multiple of `num_generations` that is at least `batch_size`: rows of a pass without gradients."""
    return -(-batch_size // num_generations) * num_generations


def sort_by_group(permutation: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The permutation with the rows of a group brought together where the group's first row stands, order kept."""
    position: dict[int, int] = {}
    for row in permutation:
        position.setdefault(groups[row], len(position))
    return sorted(permutation, key=lambda row: position[groups[row]])


def shuffle_by_group(
    batch: dict[str, Any], arrange: Callable[[Sequence[int], Sequence[int]], list[int]] = sort_by_group
) -> dict[str, Any]:
    """TRL's `shuffle_sequence_dict` for a generation batch, with the completions of a prompt kept together.

    Draws the same random numbers. A value with no entry per row (a number, None) is kept. Pixel inputs that TRL has cut
    into rows are one object for all rows of a group, and keep no other memory.

    Args:
        batch: `prompt_ids` and `prompt_mask` (N, P), and tensors or lists with one entry per row.
        arrange: returns another permutation, given a random one and the number of the group of each row.
    """
    pixels = {name: batch[name] for name in IMAGE_INPUTS if batch.get(name) is not None}
    by_row = list(zip(*pixels.values(), strict=True)) if pixels else None
    groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], by_row)
    batch = batch | {
        name: _one_per_group(values, groups) for name, values in pixels.items() if isinstance(values, list)
    }
    order = arrange(torch.randperm(len(groups)).tolist(), groups)

    def reordered(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
            return value
        return value[order] if isinstance(value, torch.Tensor) else [value[row] for row in order]

    return {key: reordered(value) for key, value in batch.items()}


def _one_per_group(values: Sequence[torch.Tensor], groups: Sequence[int]) -> list[torch.Tensor]:
    kept = [owned(values[row], values[row].device) for row in first_rows(groups)]
    return [kept[group] for group in groups]


def why_not_regroup(
    *,
    loss_type: str,
    entropy_bonus: bool = False,
    top_entropy_quantile: float = 1.0,
    router_loss: bool = False,
    steps_per_generation: int = 1,
    gradient_accumulation_steps: int = 1,
) -> str | None:
    """Why bringing completions of a prompt into one micro-batch would change the optimizer step; None if it does not.

    Args:
        loss_type: TRL's.
        entropy_bonus: whether an entropy term is part of the loss, of TRL or of this library.
        top_entropy_quantile: TRL's, in (0, 1].
        router_loss: whether the load-balancing loss of a mixture of experts is part of the loss.
        steps_per_generation: micro-batches per rollout.
        gradient_accumulation_steps: micro-batches per optimizer step.
    """
    if loss_type not in REGROUPABLE_LOSSES:
        return f"the loss {loss_type} divides by the tokens of a micro-batch"
    if entropy_bonus:
        return "the entropy term is a mean over the tokens of a micro-batch"
    if top_entropy_quantile < 1.0:
        return "top_entropy_quantile is taken over the tokens of a micro-batch"
    if router_loss:
        return "the load-balancing loss is taken over the tokens of a micro-batch"
    if gradient_accumulation_steps % steps_per_generation:
        return "a rollout is spread over several optimizer steps"
    return None


def inputs_of_rows(inputs: Mapping[str, Any], parts: Mapping[str, Sequence[slice]], row: int) -> list[torch.Tensor]:
    """The pixel inputs of one row; `parts` as `rows_of_images` returns it."""
    return [inputs[name][slices[row]] for name, slices in parts.items()]


def tokens_of_a_pass(device: str) -> int:
    """Return what a further pass costs on a type of device, in tokens."""
    return _OF_A_PASS.get(device, _ON_OTHERS)


def cut_by_length(lengths: Sequence[int], of_a_pass: int) -> list[list[int]]:
    """Return the rows of each pass, of which every row is as long as the longest, such that together they cost least.

    Rows stand by length, the longest first, unless one pass is cheapest: it has them as they are.

    Args:
        lengths: (N,) tokens of each row.
        of_a_pass: what a pass costs besides its tokens, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    falls = [place for place in range(1, len(order)) if lengths[order[place]] < lengths[order[place - 1]]]
    best = {len(order): (0, 0)}  # place -> cost of the rows from there on, end of the first pass over them
    for start in [*reversed(falls), 0]:
        longest = lengths[order[start]]
        best[start] = min((of_a_pass + (end - start) * longest + cost, end) for end, (cost, _) in best.items())
    passes, start = [], 0
    while start < len(order):
        end = best[start][1]
        passes.append(order[start:end])
        start = end
    return passes if len(passes) > 1 else [list(range(len(lengths)))]
