"""Image inputs of a batch, cut into those of consecutive rows."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from vgr_trl.errors import DataError
from vgr_trl.sharing.images import rows_of_images
from vgr_trl.sharing.report import CannotShare

_PER_IMAGE = ("image_grid_thw", "image_sizes", "image_position_ids")
_PER_TILE = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


class ImageRows:
    """Knows which part of the image inputs of N rows belongs to which row.

    Args:
        inputs: image inputs as processors return them: an entry per row, image, tile or patch.
        is_image: (N, P) bool, placeholder tokens of images; nowhere True if the model does not say which they are.
        num_images: (N,) images of each row. None: as many as its placeholder tokens are worth.
        num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles.

    Raises:
        DataError: the inputs cannot be assigned to rows, or the counts contradict inputs or tokens.
    """

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        is_image: torch.Tensor,
        num_images: Sequence[int] | None,
        num_tiles: Sequence[int] | None,
    ) -> None:
        self.inputs = dict(inputs)
        counts = f"num_images is {_shown(num_images)} and num_tiles {_shown(num_tiles)}"
        unknown = sorted(self.inputs.keys() - {*_PER_IMAGE, *_PER_TILE})
        if unknown:
            raise DataError(
                f"The input {unknown[0]} cannot be cut into chunks: score all rows at once (batch_size=None)."
            )
        wanted = f"{counts} for {len(is_image)} rows that pass in chunks: give one number for each row"
        has_image = is_image.any(1).tolist()  # (N,)
        if num_images is None:
            try:
                self.parts = rows_of_images(self.inputs, is_image)
            except CannotShare as error:
                raise DataError(f"{wanted}, since the tokens do not tell which images are whose ({error}).") from error
        else:
            given = [int(count) > 0 for count in num_images]
            if is_image.any() and given != has_image:
                raise DataError(f"{wanted}, more than 0 where the prompt has placeholder tokens of images, else 0.")
            self.parts, has_image = _parts(self.inputs, num_images, num_tiles), given
        self.has_image: list[bool] = has_image
        for name, value in self.inputs.items():
            rows = self.parts[name]
            if len(rows) != len(is_image) or rows[-1].stop != len(value):
                raise DataError(f"{wanted}, which add up to {name} of shape {tuple(value.shape)}.")

    def of(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the inputs of rows [start, stop), nothing if these rows have no image."""
        if not any(self.has_image[start:stop]):
            return {}
        return {
            name: value[self.parts[name][start].start : self.parts[name][stop - 1].stop]
            for name, value in self.inputs.items()
        }


def _parts(
    inputs: Mapping[str, torch.Tensor], num_images: Sequence[int], num_tiles: Sequence[int] | None
) -> dict[str, list[slice]]:
    images = _slices(num_images)
    tiles = images if num_tiles is None else _slices(num_tiles)
    parts = dict.fromkeys(_PER_IMAGE, images) | dict.fromkeys(_PER_TILE, tiles)
    pixels = inputs.get("pixel_values")
    if "image_grid_thw" in inputs:
        patches = inputs["image_grid_thw"].prod(-1).tolist()
        parts["pixel_values"] = _slices([sum(patches[part]) for part in images])
    elif pixels is not None and pixels.ndim == 5 and "image_sizes" not in inputs:  # padded to the row with most images
        parts |= dict.fromkeys(_PER_TILE, _slices([1] * len(num_images)))
    return parts


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(int(count) for count in counts)])]


def _shown(counts: Sequence[int] | None) -> list[int] | None:
    return None if counts is None else [int(count) for count in counts]
