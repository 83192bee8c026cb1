"""Shuffled squares and enlarged parts, by hand."""

import numpy as np
import pytest
from PIL import Image

from vgr_trl.signals.perturbation import crop_image, shuffle_patches
from vgr_trl.utils import ConfigError, DataError

MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16")


def numbered(mode="I"):
    """5 x 4 pixels, each of another value."""
    return Image.fromarray(np.arange(20, dtype=np.int32).reshape(4, 5)).convert(mode)


def test_squares_change_places_and_the_edge_stays():
    """2 x 2 squares of 2 pixels; the fifth column belongs to none."""
    before = np.asarray(numbered())
    results = [np.asarray(shuffle_patches(numbered(), patch_size=2, seed=seed)) for seed in range(8)]
    squares = {before[y : y + 2, x : x + 2].tobytes() for y in (0, 2) for x in (0, 2)}
    for after in results:
        assert {after[y : y + 2, x : x + 2].tobytes() for y in (0, 2) for x in (0, 2)} == squares
        assert (after[:, 4] == before[:, 4]).all()
    assert len({after.tobytes() for after in results}) > 3
    assert (np.asarray(shuffle_patches(numbered(), patch_size=2, seed=3)) == results[3]).all()


def test_a_quarter_of_the_area_is_shown_twice_as_large():
    """Of 4 x 4 pixels 2 x 2 are kept, each of which becomes 2 x 2."""
    image = Image.fromarray(np.arange(16, dtype=np.int32).reshape(4, 4))
    found = [np.asarray(crop_image(image, share=0.25, seed=seed)) for seed in range(12)]
    for after in found:
        corner = int(after[0, 0])
        assert after[::2, ::2].tolist() == [[corner, corner + 1], [corner + 4, corner + 5]]
        assert (after[::2, ::2] == after[1::2, 1::2]).all()
    assert len({after.tobytes() for after in found}) > 3
    assert crop_image(image, share=1.0, seed=0).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("perturb", [shuffle_patches, crop_image])
def test_every_mode_keeps_mode_and_size(mode, perturb):
    image = (
        numbered("L").convert(mode) if mode != "I;16" else Image.fromarray(np.arange(20, dtype=np.uint16).reshape(4, 5))
    )
    result = perturb(image, seed=1)
    assert (result.mode, result.size) == (image.mode, image.size)


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"share is 0: give a number in \(0, 1\]"):
        crop_image(numbered(), share=0, seed=0)
    with pytest.raises(ConfigError, match="patch_size is 0"):
        shuffle_patches(numbered(), patch_size=0, seed=0)
    with pytest.raises(DataError, match="A perturbation got a value of type str"):
        crop_image("image.png", seed=0)
