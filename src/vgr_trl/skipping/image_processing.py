"""Images made into pixel inputs once per rollout: TRL has its processor do so for every completion, and twice."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature

from vgr_trl.batch.image_parts import Parts, UnknownParts, image_inputs_of, parts_by_counts
from vgr_trl.replacing import replaced_method

# What processors of transformers return beside pixel inputs: one entry per image, or per row of images.
_PER_IMAGE = {"num_patches", "num_crops", "num_soft_tokens_per_image"}
_PER_ROW = {"rows", "cols"}
_EXACT = "transformers.models."  # where processors draw no lots


@contextmanager
def images_processed_once(processor: Any) -> Iterator[None]:
    """Let a processor make pixel inputs of equal rows of images once in this block, whichever its calls ask for them.

    What it returns is what it returns otherwise, in tensors of PyTorch also where none are asked for. Rows are lists of
    images of Pillow; everything else, and processors from elsewhere than transformers, are left alone.

    Args:
        processor: of prompts; one without an image processor is left alone, too.
    """
    images: Any = getattr(processor, "image_processor", None)
    if not type(images).__module__.startswith(_EXACT):
        yield
        return
    with replaced_method(images, "preprocess", _ProcessedOnce(images, images.preprocess)):
        yield


@dataclass
class _ProcessedOnce:
    """An image processor's `preprocess`, which remembers what it has returned."""

    processor: Any
    plain: Callable[..., Any]
    _known: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    _is_known: bool = True  # how its outputs lie

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        as_tensors = not args and options.get("return_tensors") in (None, "pt")
        keys = _keys(images) if as_tensors and self._is_known else None
        if keys is None:
            return self.plain(images, *args, **options)
        told = [f"{name}={value}" for name, value in options.items() if value != getattr(self.processor, name, None)]
        call = (*sorted(one for one in told if not one.startswith("return_tensors=")), *keys)
        if call not in self._known:
            outputs = self._outputs(images, keys, options)
            if outputs is None:
                self._is_known = False
                return self.plain(images, **options)
            self._known[call] = outputs
        return BatchFeature(dict(self._known[call]))

    def _outputs(self, images: list[Any], keys: list[Hashable], options: dict[str, Any]) -> dict[str, Any] | None:
        """For all rows, from those for the different ones among them; None if it is not known how they lie."""
        different = list(dict.fromkeys(keys))
        rows = [images[keys.index(key)] for key in different]
        found = self.plain(rows, **options | {"return_tensors": "pt"})
        try:
            parts = _parts(found, [len(row) for row in rows])
        except UnknownParts:
            return None
        if len(different) == len(keys):
            return dict(found)
        own = [different.index(key) for key in keys]
        return {name: _joined([value[parts[name][one]] for one in own]) for name, value in found.items()}


def _keys(images: Any) -> list[Hashable] | None:
    """What tells each row of images from others; None unless all are lists of plain images."""
    if not isinstance(images, list) or not all(isinstance(row, list) for row in images):
        return None
    flat = {id(image): image for row in images for image in row}
    if not flat or not all(isinstance(image, Image.Image) and image.palette is None for image in flat.values()):
        return None
    known = {number: _key(image) for number, image in flat.items()}
    return [tuple(known[id(image)] for image in row) for row in images]


def _key(image: Image.Image) -> Hashable:
    digest = blake2b(image.tobytes(), digest_size=16).digest()
    return image.mode, image.size, str(image.info.get("transparency")), digest


def _parts(found: Mapping[str, Any], num_images: Sequence[int]) -> Parts:
    """Return which part of each output belongs to which row, given the images of the rows."""
    ends = [0, *accumulate(num_images)]
    by_row, by_image = ([slice(*pair) for pair in pairwise(of_rows)] for of_rows in (range(len(ends)), ends))
    tiles = found["num_patches"] if "num_patches" in found else found["num_crops"] + 1 if "num_crops" in found else None
    num_tiles = None if tiles is None else [int(tiles[part].sum()) for part in by_image]
    parts = parts_by_counts(image_inputs_of(found), num_images, num_tiles)
    parts |= dict.fromkeys(_PER_IMAGE & found.keys(), by_image) | dict.fromkeys(_PER_ROW & found.keys(), by_row)
    if unknown := [name for name in found if name not in parts or len(found[name]) != parts[name][-1].stop]:
        raise UnknownParts(f"the output {unknown[0]} of an image processor")
    return parts


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return [entry for value in values for entry in value]
