"""Find the tokens of a micro-batch that have loss, and the columns of each row that a training pass runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgr_trl.rows import valid_tokens
from vgr_trl.run import Features
from vgr_trl.sharing.prefix_split import is_image_token


class Extent(NamedTuple):
    """Tokens of a row's prompt and completion that run, 0 of the completion if the row does not, and its prompt."""

    prompt: int
    completion: int
    group: int


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
    """Count the positions of a pass over some rows, with each prompt once, and with the prompt of every row."""
    running = [extent for extent in extents if extent.completion]
    completions, prompts = sum(each.completion for each in running), {each.group: each.prompt for each in running}
    return sum(prompts.values()) + completions, sum(each.prompt for each in running) + completions


@dataclass(frozen=True)
class Skipping:
    """Decides which rows, columns and tokens of a micro-batch run.

    Attributes:
        features: the features of a run, by name.
        has_tools: whether completions may have images, which tools return.
    """

    features: Features
    has_tools: bool = False

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

    def extents(self, batch: Mapping[str, Any], groups: Sequence[int]) -> list[Extent]:
        """Return the tokens that each row of a training batch computes, and the number of its prompt."""
        loss_mask, prompt_mask = self.loss_mask(batch), batch["prompt_mask"]
        if not self.features.share_training.enabled:  # TRL's pass computes padding, too
            return [Extent(prompt_mask.size(1), loss_mask.size(1), group) for group in groups]
        runs = loss_mask.any(1) | (not self.rows)
        completions = last_column(loss_mask if self.padding else valid_tokens(batch)).clamp(min=1) * runs
        columns = torch.stack([prompt_mask.sum(1), completions], dim=1).tolist()  # the host waits once
        pairs = zip(columns, groups, strict=True)
        return [Extent(prompt, completion, group) for (prompt, completion), group in pairs]

    def runs_images(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the images of a micro-batch run even if no row has loss."""
        return not self.features.skip_images.enabled and inputs.get("pixel_values") is not None

    def lengths(self, inputs: Mapping[str, Any], loss_mask: Tensor, config: Any) -> list[int]:
        """Return the columns of each row's completion that run, (N,), 0 for rows that do not run; one row always runs.

        Args:
            inputs: arguments of TRL's scoring, but for the model.
            loss_mask: (N, T) bool.
            config: configuration of the model, which names its image tokens.
        """
        length = inputs["logits_to_keep"]
        read = loss_mask if self.padding else inputs["attention_mask"][:, -length:].bool()
        if self.has_tools and inputs.get("pixel_values") is not None:
            images = is_image_token(inputs["input_ids"][:, -length:], config)
            # Images of completions run whole, and sharing needs a token behind them.
            read = read | images | torch.nn.functional.pad(images[:, :-1], (1, 0))
        runs = loss_mask.any(1) | (not self.rows)
        prompts = inputs["attention_mask"][:, :-length].sum(1)
        columns = torch.stack([last_column(read).clamp(min=1) * runs, prompts], dim=1).tolist()  # the host waits once
        lengths, widths = ([row[place] for row in columns] for place in (0, 1))
        counts = inputs.get("num_images") or [1] * len(lengths)
        needed = [row for row, count in enumerate(counts) if count > 0] if self.runs_images(inputs) else []
        needed = needed or [*range(len(lengths))]
        if not any(lengths[row] for row in needed):  # all parameters take part in a pass, and so do images if they must
            lengths[min(needed, key=widths.__getitem__)] = 1
        return lengths


def last_column(read: Tensor) -> Tensor:
    """Return the number of columns up to the last token to read, (N,), of (N, T) bool."""
    return (read * torch.arange(1, read.size(1) + 1, device=read.device)).amax(1)


def find_text(inputs: Mapping[str, Any], config: Any) -> dict[str, Any] | None:
    """Return the end of a prompt and the first token of its completion as a batch of one row without images, or None.

    A micro-batch without loss runs it where all parameters have to take part.

    Args:
        inputs: arguments of TRL's scoring, but for the model.
        config: configuration of the model, which names its image tokens.
    """
    start = inputs["input_ids"].size(1) - inputs["logits_to_keep"]
    columns = slice(max(start - 2, 0), start + 1)
    images = is_image_token(inputs["input_ids"][:, columns], config).any(1).tolist()
    if all(images) or start < 2:
        return None
    row = slice(images.index(False), images.index(False) + 1)
    per_token = {name: inputs[name][row, columns] for name in ("input_ids", "attention_mask")}
    return per_token | {"logits_to_keep": 1}
