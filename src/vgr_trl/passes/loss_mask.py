"""Find the loss mask of a micro-batch and its smallest window, cut the window out, and scatter its results back.

`Skipping` decides which rows, columns and images of a training pass run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgr_trl.errors import DataError
from vgr_trl.patching import patched_method
from vgr_trl.pixels import IMAGE_INPUTS, on_device
from vgr_trl.rows import take_rows, valid_tokens
from vgr_trl.run_facts import Features
from vgr_trl.sharing.lending import sort_by_group
from vgr_trl.sharing.model_support import replace_hidden_states
from vgr_trl.sharing.prefix_split import PER_TOKEN, is_image_token


@dataclass(frozen=True)
class Window:
    """The rows and columns of a micro-batch (N, P + T) that run.

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


class Extent(NamedTuple):
    """Columns of a row's prompt and completion that run, whether the row runs, and the number of its prompt."""

    prompt: int
    completion: int
    runs: bool
    group: int = 0


def find_window(
    extents: Sequence[Extent], width: tuple[int, int], multiple: int | None, num_images: Sequence[int] | None = None
) -> Window:
    """Return the smallest window that holds the extents of all rows that run.

    If no row runs it is one row and one column: every process makes a pass, in which all parameters take part. For the
    same reason a row with an image stays if there was one.

    Args:
        extents: (N,) columns computed per row.
        width: of the batch, P and T.
        multiple: the columns of prompts and of completions are multiples of it, unless the batch has fewer.
        num_images: images of each row; None: there are none, or none has to run.
    """
    kept = [row for row, extent in enumerate(extents) if extent.runs]
    candidates = [row for row, count in enumerate(num_images or ()) if count > 0] or range(len(extents))
    if not set(kept).intersection(candidates):
        kept = sorted([*kept, min(candidates, key=lambda row: extents[row].prompt)])
    prompt, completion = (max(columns) for columns in zip(*(extents[row][:2] for row in kept), strict=True))
    return Window(
        kept,
        _up_to_multiple(prompt, multiple, width[0]),
        _up_to_multiple(max(completion, 1), multiple, width[1]),
    )


def find_text(is_image: torch.Tensor, completion: int, multiple: int | None = None) -> Window | None:
    """Return a text-only window, the end of a prompt and the beginning of its completion, or None.

    It has two tokens of the prompt, so that this process can share prompts where others do.

    Args:
        is_image: (N, P + T) bool, image tokens.
        completion: T.
        multiple: as for `find_window`.
    """
    prompt = is_image.size(1) - completion
    before, behind = _up_to_multiple(2, multiple, prompt), _up_to_multiple(1, multiple, completion)
    rows = (~is_image[:, prompt - before : prompt + behind]).all(1).nonzero().flatten().tolist()
    return Window(rows[:1], before, behind, images=False) if rows else None


def find_extents(read: torch.Tensor, prompt_mask: torch.Tensor, runs: Sequence[bool]) -> list[Extent]:
    """Return the columns computed per row, without padding before prompts and behind the last token to read.

    Args:
        read: (N, T) bool, tokens of completions that have to run.
        prompt_mask: (N, P), padded on the left.
        runs: (N,) whether the row runs.
    """
    columns = torch.arange(1, read.size(1) + 1, device=read.device)
    completions = (read * columns).amax(1).tolist()  # (N,)
    prompts = (prompt_mask.size(1) - prompt_mask.int().argmax(1)).tolist()  # (N,)
    return [Extent(*of_row) for of_row in zip(prompts, completions, runs, strict=True)]


def _up_to_multiple(length: int, multiple: int | None, largest: int) -> int:
    return min(length + -length % (multiple or 1), largest)


def group_by_length(order: Sequence[int], groups: Sequence[int], lengths: Sequence[int], window: int) -> list[int]:
    """Return a permutation in which rows of similar length, and the rows of a group, stand together.

    Groups are sorted by their longest row, the longest first, and so are the rows of a group; ties keep their order.

    Args:
        order: permutation of the N rows.
        groups: (N,) number of the group of each row.
        lengths: (N,) length of each row.
        window: rows are only permuted within blocks of this many rows of `order`.
    """
    arranged: list[int] = []
    for start in range(0, len(order), window):
        rows = sort_by_group(order[start : start + window], groups)
        arranged += sort_by_group(sorted(rows, key=lambda row: -lengths[row]), groups)
    return arranged


def pack_rows(count: int, load: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Cut rows, in order, into parts whose load is at most 1; a part has one row at least.

    Args:
        count: N.
        load: returns the load of a pass over some rows, a share of what the pass may compute.
    """
    parts: list[list[int]] = [[0]]
    for row in range(1, count):
        wider = [*parts[-1], row]
        if load(wider) > max(1, load(parts[-1])):
            parts.append([row])
        else:
            parts[-1] = wider
    return parts


def count_positions(extents: Sequence[Extent]) -> tuple[int, int]:
    """Count the positions that a pass over some rows computes, padding included; skipped rows cost nothing.

    Prompts are as wide as the longest, and so are completions.

    Returns:
        The positions with the prompt of a group computed once, and with the prompt of every row computed.
    """
    running = [extent for extent in extents if extent.runs]
    longest = max((extent.prompt for extent in running), default=0)
    completions = len(running) * max((extent.completion for extent in running), default=0)
    return len({extent.group for extent in running}) * longest + completions, len(running) * longest + completions


def score_only_tokens(causal: Any, base: Any, wanted: torch.Tensor | None) -> AbstractContextManager[None]:
    """Restrict TRL's fused head to the wanted tokens; others get log-probability and entropy 0, and no gradient.

    TRL skips positions without a label only where it has Triton, and cannot skip others.

    Args:
        causal: transformers model with TRL's fused head.
        base: the model below the head.
        wanted: (N, T) bool, of the last T columns of every batch that passes in this block. None: all with a label.
    """
    forward: Callable[..., Any] = causal.forward

    @wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        labels, next_tokens = kwargs.get("labels"), kwargs.get("shift_labels")  # (N, S + 1), (N, S)
        if next_tokens is None and labels is not None:
            next_tokens = labels[:, 1:]
        if torch.compiler.is_compiling() or not kwargs.get("fused_lm_head") or next_tokens is None:
            return forward(*args, **kwargs)
        scored = next_tokens != -100
        if wanted is not None:
            scored[:, : -wanted.size(1)] = False
            scored[:, -wanted.size(1) :] &= wanted

        def select_emitting(hidden: torch.Tensor) -> torch.Tensor:
            """Return (1, K, D) of (N, S or more, D)."""
            return hidden[:, : scored.size(1)][scored.to(hidden.device)].unsqueeze(0)

        with replace_hidden_states(base, select_emitting):
            outputs = forward(*args, **kwargs | {"labels": None, "shift_labels": next_tokens[scored].unsqueeze(0)})
        for name in ("log_probs", "entropy"):
            if (value := getattr(outputs, name)) is not None:
                every = value.new_zeros(scored.shape)
                setattr(outputs, name, every.masked_scatter(scored.to(value.device), value))
        return outputs

    return patched_method(causal, "forward", chosen)


_OF_IMAGES = {*IMAGE_INPUTS, "num_images", "num_tiles"}


def trim_inputs(inputs: Mapping[str, Any], window: Window, loss_mask: torch.Tensor | None = None) -> dict[str, Any]:
    """Cut a window out of the arguments of TRL's `_get_per_token_logps_and_entropies`.

    Args:
        inputs: its named arguments but for the model: `logits_to_keep` is T; an input may be None.
        window: rows and columns to keep.
        loss_mask: (N, T) bool; in each row, columns behind the last of these tokens become padding. None: none do.

    Raises:
        DataError: rows are left out, and pixel inputs cannot be assigned to rows.
    """
    ids = inputs["input_ids"]  # (N, P + T)
    start = ids.size(1) - inputs["logits_to_keep"] - window.prompt
    columns = slice(start, start + window.prompt + window.completion)
    kept = {name: value for name, value in inputs.items() if window.images or name not in _OF_IMAGES}
    part = take_rows(kept, window.rows) | {"logits_to_keep": window.completion}
    for name in PER_TOKEN:
        if part.get(name) is not None:
            part[name] = part[name][:, columns]
    if loss_mask is not None:
        rows = on_device(window.rows, loss_mask.device)
        read = loss_mask[rows, : window.completion].flip(1).cumsum(1).flip(1) > 0  # (rows, columns)
        part["attention_mask"] = part["attention_mask"] * torch.nn.functional.pad(read, (window.prompt, 0), value=True)
    return part


def scatter_back(values: torch.Tensor, window: Window, loss_mask: torch.Tensor) -> torch.Tensor:
    """Scatter windowed results back to (N, T), with 0 for tokens without loss.

    Args:
        values: (rows, columns) of the window.
        window: rows and columns that ran.
        loss_mask: (N, T) bool.
    """
    wide = torch.nn.functional.pad(values, (0, loss_mask.size(1) - values.size(1)))
    every = wide.new_zeros(loss_mask.shape).index_copy(0, on_device(window.rows, values.device), wide)
    return torch.where(loss_mask, every, 0)


@dataclass(frozen=True)
class Skipping:
    """Decides which rows, columns and tokens of a micro-batch run.

    Attributes:
        features: the features of a run, by name.
        has_tools: whether completions may have images, which tools return.
        multiple: the columns of prompts and of completions are multiples of it; None: of 1.
    """

    features: Features
    has_tools: bool = False
    multiple: int | None = None

    @property
    def rows(self) -> bool:
        """Whether rows without loss are skipped."""
        return self.features.skip_zero_advantage.enabled

    @property
    def padding(self) -> bool:
        """Whether columns without loss are skipped."""
        return self.features.skip_padding.enabled

    def loss_mask(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the tokens of a training batch whose log-probabilities the loss reads, (N, T) bool."""
        advantages, valid = batch["advantages"], valid_tokens(batch).bool()
        credited: Tensor = valid & (advantages if advantages.ndim == 2 else advantages.unsqueeze(1)).ne(0)  # (N, T)
        if self.features.skip_zero_advantage_tokens.enabled:
            return credited
        return valid & credited.any(1, keepdim=True) if self.rows else valid

    def extents(self, batch: Mapping[str, Any]) -> list[Extent]:
        """Return the columns that each row of a training batch computes."""
        loss_mask = self.loss_mask(batch)
        return self._extents(loss_mask, batch["prompt_mask"], loss_mask)

    def _extents(self, loss_mask: Tensor, prompt_mask: Tensor, read: Tensor) -> list[Extent]:
        runs = (loss_mask.any(1) | (not self.rows)).tolist()
        if self.padding:
            return find_extents(read, prompt_mask, runs)
        return [Extent(prompt_mask.size(1), read.size(1), ran) for ran in runs]

    def runs_images(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the images of a micro-batch run even if no row has loss."""
        return not self.features.skip_images.enabled and inputs.get("pixel_values") is not None

    def trim(self, inputs: Mapping[str, Any], loss_mask: Tensor, config: Any) -> tuple[dict[str, Any], Window]:
        """Cut the smallest window with all tokens with loss out of a micro-batch.

        Args:
            inputs: arguments of TRL's scoring, but for the model.
            loss_mask: (N, T) bool.
            config: configuration of the model, which names its image tokens.
        """
        length, read = inputs["logits_to_keep"], loss_mask
        if self.has_tools and inputs.get("pixel_values") is not None:
            images = is_image_token(inputs["input_ids"][:, -length:], config)
            # Sharing needs a token behind the images of a row.
            read = loss_mask | images | torch.nn.functional.pad(images[:, :-1], (1, 0))
        cut, window = read if self.padding else None, None
        if self.rows and self.padding and not self.runs_images(inputs) and not loss_mask.any():
            window = find_text(is_image_token(inputs["input_ids"], config), length, self.multiple)
        if window is None:
            prompt_mask = inputs["attention_mask"][:, :-length]
            extents, num_images = self._extents(loss_mask, prompt_mask, read), inputs.get("num_images")
            num_images = num_images if self.runs_images(inputs) else None
            window = find_window(extents, (prompt_mask.size(1), length), self.multiple, num_images)
        try:
            return trim_inputs(inputs, window, cut), window
        except DataError:  # the pixels of a row are not known, so that every row stays
            window = replace(window, rows=list(range(len(loss_mask))))
            return trim_inputs(inputs, window, cut), window
