"""The features of each image among the outputs of `get_image_features`, and such outputs made of them again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass(frozen=True)
class ImageFeatures:
    """Of one image.

    Attributes:
        pooled: what its placeholder tokens become, (tokens, D).
        deepstack: what is added to them in the first layers of the decoder, one (tokens, D) each; None: nothing.
    """

    pooled: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] | None

    @property
    def bytes(self) -> int:
        """Of memory."""
        return sum(value.nbytes for value in (self.pooled, *(self.deepstack or ())))


@dataclass(frozen=True)
class Form:
    """How a family returns features: class of the outputs, one tensor or a list or tuple of one per image.

    Attributes:
        behind: whether the deepstack features of a layer are one tensor of all images behind each other.
    """

    outputs: type
    pooled: type
    deepstack: type | None
    behind: bool = False

    def join(self, features: Sequence[ImageFeatures]) -> Any:
        """Return outputs that hold these features and nothing else."""
        found = {"pooler_output": _together([one.pooled for one in features], self.pooled)}
        if self.deepstack is not None:
            levels = zip(*(one.deepstack or () for one in features), strict=True)
            found["deepstack_features"] = [
                torch.cat(level) if self.behind else _together(list(level), self.deepstack) for level in levels
            ]
        outputs = self.outputs()
        for name, value in found.items():  # before transformers 5.20 some are no fields of their outputs
            setattr(outputs, name, value)
        return outputs


def split(outputs: Any, count: int) -> tuple[Form, list[ImageFeatures]] | None:
    """Return how outputs hold the features of `count` images, and copies of these; None if it is not known."""
    pooled: Any = getattr(outputs, "pooler_output", None)
    deepstack = getattr(outputs, "deepstack_features", None)
    levels = [] if deepstack is None else list(deepstack)
    behind = bool(levels) and isinstance(pooled, list | tuple) and all(_is_behind(level, pooled) for level in levels)
    if behind:
        levels = [level.split([len(one) for one in pooled]) for level in levels]
    if not isinstance(outputs, ModelOutput) or not all(_is_one_each(values, count) for values in (pooled, *levels)):
        return None
    form = Form(type(outputs), _kind(pooled), _kind(levels[0]) if levels else None, behind)
    features = [
        ImageFeatures(_own(pooled[one]), tuple(_own(level[one]) for level in levels) if levels else None)
        for one in range(count)
    ]
    return form, features


def _own(value: torch.Tensor) -> torch.Tensor:
    """A copy: what is returned here may be a part of the features of all images."""
    return value.detach().clone()


def _is_one_each(values: Any, count: int) -> bool:
    if isinstance(values, torch.Tensor):
        return values.ndim > 1 and len(values) == count
    return (
        isinstance(values, list | tuple)
        and len(values) == count
        and all(isinstance(value, torch.Tensor) for value in values)
    )


def _is_behind(level: Any, pooled: Sequence[torch.Tensor]) -> bool:
    return isinstance(level, torch.Tensor) and level.ndim == 2 and len(level) == sum(len(one) for one in pooled)


def _kind(values: Any) -> type:
    return torch.Tensor if isinstance(values, torch.Tensor) else type(values)


def _together(values: list[torch.Tensor], kind: type) -> Any:
    return torch.stack(values) if kind is torch.Tensor else kind(values)
