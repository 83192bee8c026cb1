"""Noise as diffusion models add it to images."""

import numpy as np
from PIL import Image

from vgr_trl.config.ranges import check_integer, check_number
from vgr_trl.signals.perturbation.modes import check_image, colours, from_array, white_level, with_colours

STEPS = 1000


def diffusion_noise(image: Image.Image, *, steps: int = 500, seed: int) -> Image.Image:
    """Return the image after so many steps of a diffusion that adds Gaussian noise to its colours and darkens them.

    With x in [0, 1] it is √ā x + √(1 - ā) ε, ε standard normal per channel and pixel, and ā of `image_left`, cut to
    [0, 1]; transparency stays (NoisyRollout, https://huggingface.co/papers/2504.13055).

    Args:
        image: PIL image of any mode.
        steps: in [0, 999]; 0 is hardly any noise.
        seed: of the random generator, at least 0.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: `image` is no PIL image.
    """
    check_image(image)
    check_integer("seed", seed, 0)
    check_integer("diffusion_steps", steps, 0)
    check_number("diffusion_steps", steps, 0, STEPS - 1, f"in [0, {STEPS - 1}]")
    shown, white = colours(image), white_level(image)
    before = np.asarray(shown, dtype=np.float64) / white
    left = image_left(steps)
    noise = np.random.default_rng(int(seed)).standard_normal(before.shape)
    after = np.sqrt(left) * before + np.sqrt(1 - left) * noise
    return with_colours(image, from_array(after.clip(0, 1) * white, shown))


def image_left(steps: int) -> float:
    """Return ā of a number of steps: the product of 1 - β over the steps 0 to `steps`.

    β of step i is sigmoid(-6 + 12 i / 999) · (0.005 - 1e-5) + 1e-5.
    """
    beta = 1 / (1 + np.exp(-np.linspace(-6, 6, STEPS))) * (0.5e-2 - 1e-5) + 1e-5
    return float(np.cumprod(1 - beta)[steps])
