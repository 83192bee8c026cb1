"""Perturbed images where a trainer keeps no images, but what a processor has made of them."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vgr_trl.errors import DataError
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.signals.modality import special_token_ids


def perturb_row(
    inputs: Mapping[str, Any], options: SignalOptions, step: int, black: Sequence[float], patch_size: int = 14
) -> dict[str, Any]:
    """Return the pixel inputs of a row with squares of its images blackened, each with probability `black_prob`.

    The seed is made of the run's, the step and the pixels: completions of one prompt get the same squares, in whatever
    process they are.

    Args:
        inputs: of one row; `pixel_values` is (patches, C x time x p x p), a patch per row and channels first, or
            (..., C, H, W).
        step: of the optimizer.
        black: per channel, what black is after the processor's normalisation.
        patch_size: of the squares, in pixels of (..., C, H, W); where patches are rows they are the squares.

    Raises:
        DataError: there are pixels in another form.
    """
    pixels = inputs.get("pixel_values")
    if pixels is None:
        return dict(inputs)
    if not isinstance(pixels, torch.Tensor) or pixels.ndim < 2:
        raise DataError(f"pixel_values is a {type(pixels).__name__}: only tensors of patches or images are perturbed.")
    content = zlib.crc32(pixels.detach().cpu().float().contiguous().numpy().tobytes())
    generator = np.random.default_rng([options.seed, step, content])
    colours = torch.tensor(black, dtype=pixels.dtype, device=pixels.device)  # (C,)
    if pixels.ndim == 2:
        if pixels.size(1) % len(black):
            raise DataError(f"pixel_values has {pixels.size(1)} numbers per patch: give {len(black)} channels first.")
        dark = torch.from_numpy(generator.random(len(pixels)) < options.black_prob).to(pixels.device)  # (patches,)
        value = colours.repeat_interleave(pixels.size(1) // len(black))
        return {**inputs, "pixel_values": torch.where(dark.unsqueeze(1), value, pixels)}
    *front, channels, height, width = pixels.shape
    if channels != len(black):
        raise DataError(f"pixel_values has the shape {tuple(pixels.shape)}: give (..., {len(black)}, height, width).")
    grid = (*front, 1, -(-height // patch_size), -(-width // patch_size))
    dark = torch.from_numpy(generator.random(grid) < options.black_prob).to(pixels.device)
    dark = dark.repeat_interleave(patch_size, -2).repeat_interleave(patch_size, -1)[..., :height, :width]
    return {**inputs, "pixel_values": torch.where(dark, colours.view(-1, 1, 1), pixels)}


def told(options: SignalOptions, step: int, processor: Any) -> dict[str, Any]:
    """Return what the actor is told with a batch: options, and what only the processor knows."""
    return {
        "options": options.to_dict(),
        "step": step,
        "special_token_ids": list(special_token_ids(processor)),
        "black": black_of(processor),
    }


def black_of(processor: Any) -> list[float]:
    """Return what black is, per channel, after the normalisation of a processor."""
    images = getattr(processor, "image_processor", None)
    mean, std = getattr(images, "image_mean", None), getattr(images, "image_std", None)
    if mean is None or std is None or not getattr(images, "do_normalize", True):
        return [0.0, 0.0, 0.0]
    return [-float(middle) / float(spread) for middle, spread in zip(mean, std, strict=True)]
