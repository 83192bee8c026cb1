"""Skip rows and tokens without an advantage, padding, and images of rows without loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgr_trl.errors import DataError
from vgr_trl.passes.loss_mask import (
    Extent,
    Window,
    find_extents,
    find_loss_mask,
    find_text,
    find_window,
    trim_inputs,
)
from vgr_trl.run_facts import Features
from vgr_trl.scoring_inputs import valid_tokens
from vgr_trl.sharing.prefix_split import is_image_token


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
        tokens = self.features.skip_zero_advantage_tokens.enabled
        return find_loss_mask(batch["advantages"], valid_tokens(batch), rows=self.rows, tokens=tokens)

    def extents(self, batch: Mapping[str, Any]) -> list[Extent]:
        """Return the columns that each row of a training batch computes."""
        return find_extents(self.loss_mask(batch), batch["prompt_mask"], rows=self.rows, padding=self.padding)

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
        window = window or find_window(
            loss_mask,
            inputs["attention_mask"][:, :-length],
            inputs.get("num_images") if self.runs_images(inputs) else None,
            rows=self.rows,
            padding=self.padding,
            multiple=self.multiple,
            read=read,
        )
        try:
            return trim_inputs(inputs, window, cut), window
        except DataError:  # the pixels of a row are not known, so that every row stays
            window = replace(window, rows=list(range(len(loss_mask))))
            return trim_inputs(inputs, window, cut), window
