"""The images of a call of a model's `get_image_features`, and what each is recognised by."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS, UnknownParts, find_layout

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> as an integer
_MAKES_MORE = ("output_hidden_states", "output_attentions")
_OF_DECODERS = ("use_cache",)  # which some models hand on to their tower


@dataclass(frozen=True)
class ImageCall:
    """What `get_image_features` is called with.

    Attributes:
        images: pixel inputs of each image (tile, where images are cut into tiles), views of those of the call.
        options: everything else, by name.
    """

    images: list[dict[str, torch.Tensor]]
    options: dict[str, Any]

    def inputs_of(self, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """The pixel inputs of some of the images, as the call would have them."""
        return {name: torch.cat([self.images[one][name] for one in chosen]) for name in self.images[0]}


def read_call(arguments: Mapping[str, Any], config: Any) -> ImageCall | None:
    """Return the images of a call; None if they cannot be told apart, or if more is wanted than their features.

    Args:
        config: of the model, whose fields are the defaults of options.
    """
    given = {name: value for name, value in arguments.items() if name in IMAGE_INPUTS and value is not None}
    options = {name: value for name, value in arguments.items() if name not in given and value is not None}
    if options.pop("return_dict", True) is False or any(options.get(name) for name in _MAKES_MORE):
        return None
    if any(not isinstance(value, bool | int | float | str | list | tuple) for value in options.values()):
        return None
    told = {name: value for name, value in options.items() if value and value != getattr(config, name, None)}
    told = {name: value for name, value in told.items() if name not in _OF_DECODERS}
    try:
        images = _images(given)
    except UnknownParts:
        return None
    return ImageCall(images, told) if images else None


def _images(given: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    units = find_layout(given).units
    if "row" in units.values():
        raise UnknownParts("images that are padded to the most of a row")
    sizes = {name: [1] * len(value) for name, value in given.items()}
    if units["pixel_values"] == "patch":
        sizes["pixel_values"] = given["image_grid_thw"].prod(-1).tolist()
    ends = {name: [0, *accumulate(counts)] for name, counts in sizes.items()}
    if len({len(of_input) for of_input in ends.values()}) > 1 or any(ends[n][-1] != len(given[n]) for n in given):
        raise UnknownParts("pixel inputs of different numbers of images")
    parts = {name: [given[name][start:stop] for start, stop in pairwise(of_input)] for name, of_input in ends.items()}
    return [dict(zip(parts, image, strict=True)) for image in zip(*parts.values(), strict=True)]


@dataclass
class Fingerprints:
    """Two numbers of 64 bits per image, each a sum of its pixels' bits times random numbers, modulo 2 ** 64.

    Different pixels have equal numbers with a probability below 2 ** -60 (multilinear hashing over integers modulo a
    power of two, https://arxiv.org/abs/1202.4961), whatever the pixels are, and the device computes them.
    """

    _factors: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def of(self, images: Sequence[torch.Tensor]) -> list[tuple[Hashable, ...]]:
        """Return what tells each of some tensors from others: shape, type, device and fingerprint."""
        sums = [self._sum(image, seed) for image in images for seed in (1, 2)]
        numbers = torch.stack(sums).view(-1, 2).tolist()
        return [(image.shape, image.dtype, image.device, *pair) for image, pair in zip(images, numbers, strict=True)]

    def _sum(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        bits = image.detach().contiguous().view(_INTEGERS[image.element_size()]).flatten(0, -2)  # (R, C)
        rows = (bits * self._numbers(bits.size(1), seed, bits.device)).sum(1)  # (R,)
        return (rows * self._numbers(len(rows), seed + 2, bits.device)).sum()

    def _numbers(self, count: int, seed: int, device: torch.device) -> torch.Tensor:
        """(count,) int64 random numbers, always the same ones."""
        known = self._factors.get((seed, device))
        if known is None or len(known) < count:
            generator = torch.Generator().manual_seed(seed)
            known = torch.randint(-(2**63), 2**63 - 1, (2 * count,), generator=generator).to(device)
            self._factors[seed, device] = known
        return known[:count]
