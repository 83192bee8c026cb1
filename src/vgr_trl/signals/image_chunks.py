"""Image inputs of a batch, cut into those of consecutive rows."""

from collections.abc import Mapping, Sequence

import torch

from vgr_trl.batch.image_parts import IMAGE_INPUTS, UnknownParts, parts_by_counts, parts_by_tokens
from vgr_trl.errors import DataError


def cut_images(
    inputs: Mapping[str, torch.Tensor],
    is_image: torch.Tensor,
    num_images: Sequence[int] | None,
    num_tiles: Sequence[int] | None,
    chunks: Sequence[slice],
) -> list[dict[str, torch.Tensor]]:
    """Return the image inputs of each chunk of rows, nothing for a chunk without images.

    Args:
        inputs: image inputs as processors return them: an entry per row, image, tile or patch.
        is_image: (N, P) bool, placeholder tokens of images; nowhere True if the model does not say which they are.
        num_images: (N,) images of each row. None: as many as its placeholder tokens are worth.
        num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles.
        chunks: rows of each.

    Raises:
        DataError: the inputs cannot be assigned to rows, or the counts contradict inputs or tokens.
    """
    if unknown := sorted(inputs.keys() - set(IMAGE_INPUTS)):
        raise DataError(f"The input {unknown[0]} cannot be cut into chunks: score all rows at once (batch_size=None).")
    wanted = (
        f"num_images is {_shown(num_images)} and num_tiles {_shown(num_tiles)} for {len(is_image)} rows that pass in "
        "chunks: give one number for each row"
    )
    has_image = is_image.any(1).tolist()  # (N,)
    try:
        if num_images is None:
            parts = parts_by_tokens(inputs, is_image)
        else:
            given = [int(count) > 0 for count in num_images]
            if is_image.any() and given != has_image:
                raise DataError(f"{wanted}, more than 0 where the prompt has placeholder tokens of images, else 0.")
            parts, has_image = parts_by_counts(inputs, num_images, num_tiles), given
    except UnknownParts as error:
        raise DataError(f"{wanted}, since nothing else tells which images are whose ({error.reason}).") from error
    if len(has_image) != len(is_image):
        raise DataError(f"{wanted}.")
    return [
        {name: value[parts[name][rows][0].start : parts[name][rows][-1].stop] for name, value in inputs.items()}
        if any(has_image[rows])
        else {}
        for rows in chunks
    ]


def _shown(counts: Sequence[int] | None) -> list[int] | None:
    return None if counts is None else [int(count) for count in counts]
