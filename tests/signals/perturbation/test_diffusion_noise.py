"""Noise of diffusion models, against numbers recorded from NoisyRollout (000b58d, verl/utils/image_aug.py)."""

import numpy as np
import pytest
from PIL import Image

from vgr_trl.signals.perturbation import diffusion_noise, image_left
from vgr_trl.utils import ConfigError, DataError


@pytest.mark.parametrize(
    ("steps", "image", "noise"),
    [
        (0, 0.999988853931427, 0.004727762658149004),
        (250, 0.9891338348388672, 0.14701807498931885),
        (500, 0.8630172610282898, 0.5051745176315308),
        (999, 0.28504252433776855, 0.9585148692131042),
    ],
)
def test_recorded_shares_of_image_and_noise(steps, image, noise):
    assert image_left(steps) ** 0.5 == pytest.approx(image, rel=2e-4)
    assert (1 - image_left(steps)) ** 0.5 == pytest.approx(noise, rel=2e-3), "recorded in float32"


def test_grey_gets_darker_and_spreads():
    """After 250 steps 128 becomes 0.98913 · 128 = 126.6; the noise has a standard deviation of 0.14702 · 255 = 37.5."""
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    after = np.asarray(diffusion_noise(grey, steps=250, seed=3), float)
    assert after.mean() == pytest.approx(0.98913 * 128, abs=0.5)
    assert after.std() == pytest.approx(0.14702 * 255, rel=0.02)
    assert np.abs(np.corrcoef(after.reshape(-1, 3).T) - np.eye(3)).max() < 0.03, "each channel has noise of its own"
    again, other = diffusion_noise(grey, steps=250, seed=3), diffusion_noise(grey, steps=250, seed=4)
    assert np.array_equal(np.asarray(again), after)
    assert not np.array_equal(np.asarray(other), after)
    assert np.abs(np.asarray(diffusion_noise(grey, steps=0, seed=1), float) - 128).max() < 10


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "I", "F", "I;16"])
def test_modes_and_sizes_stay(mode):
    image = Image.fromarray(np.arange(20, dtype=np.int32).reshape(4, 5)).convert(mode)
    after = diffusion_noise(image, seed=0)
    assert (after.mode, after.size) == (mode, (5, 4))


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"diffusion_steps is 1000: give a number in \[0, 999\]"):
        diffusion_noise(Image.new("L", (2, 2)), steps=1000, seed=0)
    with pytest.raises(DataError, match="give a PIL image"):
        diffusion_noise("x", seed=0)
