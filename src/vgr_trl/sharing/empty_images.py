"""Pixel inputs that hold no image, on which models fail."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from vgr_trl.errors import DataError
from vgr_trl.pixels import (
    IMAGE_INPUTS,
)
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    is_compiled,
)


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a pass hold an image; Idefics pads rows without an image."""
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    return pixels is not None and len(pixels) > 0 and (mask is None or bool(mask.any()))


def drop_empty_images(inputs: Mapping[str, Any], agree: Callable[[bool], bool] | None = None) -> dict[str, Any]:
    """Return the inputs of a pass, without pixel inputs that hold no image.

    TRL cuts a batch into chunks. A chunk of rows without images has empty pixels, or padding, on which models fail.

    Args:
        inputs: of the pass, by name.
        agree: returns whether an answer is True in all processes, where parameters are sharded: the vision tower then
            runs in every process or in none. None: each process decides alone.

    Raises:
        DataError: only some processes have images; it is raised in all processes.
    """
    mine = has_images(inputs)
    if agree is not None and not agree(mine) and not agree(not mine):
        has = f"A batch of this process has {'images' if mine else 'no images'}, unlike a batch of another process"
        raise DataError(f"{has}, and the parameters are sharded: give every row images, or none, or use ZeRO-2 or DDP.")
    empty = inputs.get("pixel_values") is not None and not mine
    return {name: value for name, value in inputs.items() if not (empty and name in IMAGE_INPUTS)}


@contextmanager
def ignore_empty_images(model: nn.Module, *, agree: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """Drop pixel inputs without images in passes of this block; `share_prompts` does so by itself.

    Args:
        model: transformers model, also wrapped; a compiled model keeps its inputs.
        agree: returns whether an answer is True in all processes, where parameters are sharded.

    Raises:
        ConfigError: `model` is no transformers model.
    """
    base = base_of(causal_model(model))
    if is_compiled(model):
        yield
        return
    agree = agree if "pixel_values" in signature(base.forward).parameters else None
    with base.register_forward_pre_hook(partial(_drop_from_call, agree), with_kwargs=True):
        yield


def _drop_from_call(agree: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, drop_empty_images(kwargs, agree)  # a function of this module, so that the model can be pickled
