"""Which tokens of a micro-batch the loss reads, and the smallest part of it that has them all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """The part of a micro-batch of (N, P + T) tokens that runs.

    Attributes:
        rows: numbers of the rows, ascending, at least one.
        prompt: last columns of the prompts, in [1, P].
        completion: first columns of the completions, in [1, T].
        images: whether those of the rows run.
    """

    rows: list[int]
    prompt: int
    completion: int
    images: bool = True


@dataclass(frozen=True)
class Extent:
    """What runs of a row by itself: columns of its prompt and of its completion, and whether it runs at all."""

    prompt: int
    completion: int
    runs: bool


def live_tokens(advantages: torch.Tensor, mask: torch.Tensor, *, rows: bool, tokens: bool) -> torch.Tensor:
    """Return the tokens whose log-probabilities the loss reads, (N, T) bool.

    Args:
        advantages: (N,) or (N, T).
        mask: (N, T), tokens that count in the loss.
        rows: whether rows without an advantage are not read.
        tokens: whether tokens without one are not read either.
    """
    valid = mask.bool()
    credited = valid & (advantages if advantages.ndim == 2 else advantages.unsqueeze(1)).ne(0)  # (N, T)
    if tokens:
        return credited
    return valid & credited.any(1, keepdim=True) if rows else valid


def find_window(
    live: torch.Tensor,
    prompt_mask: torch.Tensor,
    num_images: Sequence[int] | None = None,
    *,
    rows: bool,
    padding: bool,
    multiple: int | None = None,
) -> Window:
    """Return the smallest part that has all live tokens.

    Without any it is one row and one column: every process makes a pass, in which all parameters take part. For the
    same reason a row with an image stays if there was one.

    Args:
        live: (N, T) bool.
        prompt_mask: (N, P), padded on the left.
        num_images: images of each row; None: there are none, or none has to run.
        multiple: of which the columns of prompts and of completions are kept, as far as there are.
    """
    lengths = _prompt_lengths(prompt_mask)
    kept = list(range(len(live)))
    if rows:
        has_image = [count > 0 for count in num_images or ()]
        kept = live.any(1).nonzero().flatten().tolist()
        shown = [row for row in range(len(live)) if has_image[row]] if any(has_image) else range(len(live))
        if not set(kept).intersection(shown):
            kept = sorted([*kept, min(shown, key=lengths.tolist().__getitem__)])
    if not padding:
        return Window(kept, prompt_mask.size(1), live.size(1))
    columns = live.any(0).nonzero().flatten().tolist()
    completion = _up_to_multiple(max(columns, default=0) + 1, multiple, live.size(1))
    return Window(kept, _up_to_multiple(int(lengths[kept].max()), multiple, prompt_mask.size(1)), completion)


def find_text(is_image: torch.Tensor, completion: int, multiple: int | None = None) -> Window | None:
    """Return the end of a prompt and the beginning of its completion, to run without images; None if they are some.

    Two tokens of the prompt: where others share prompts, this process can do as they do.

    Args:
        is_image: (N, P + T) bool, tokens that stand for images.
    """
    prompt = is_image.size(1) - completion
    before, behind = _up_to_multiple(2, multiple, prompt), _up_to_multiple(1, multiple, completion)
    rows = (~is_image[:, prompt - before : prompt + behind]).all(1).nonzero().flatten().tolist()
    return Window(rows[:1], before, behind, images=False) if rows else None


def extents_of(live: torch.Tensor, prompt_mask: torch.Tensor, *, rows: bool, padding: bool) -> list[Extent]:
    """Return what runs of each row; arguments as those of `find_window`."""
    columns = torch.arange(1, live.size(1) + 1, device=live.device)
    completions = (live * columns).amax(1).tolist()  # (N,)
    runs = live.any(1).tolist()
    if not padding:
        prompts, completions = [prompt_mask.size(1)] * len(live), [live.size(1)] * len(live)
    else:
        prompts = _prompt_lengths(prompt_mask).tolist()
    return [Extent(*extent) for extent in zip(prompts, completions, [ran or not rows for ran in runs], strict=True)]


def _prompt_lengths(prompt_mask: torch.Tensor) -> torch.Tensor:
    return prompt_mask.size(1) - prompt_mask.int().argmax(1)  # (N,)


def _up_to_multiple(length: int, multiple: int | None, largest: int) -> int:
    return min(length + -length % (multiple or 1), largest)
