"""Perturbed images: every mode and size of Pillow, opaque black, seeds that repeat, and every error."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vgr_trl import registries
from vgr_trl.config import PERTURBATIONS as NAMES
from vgr_trl.config import REMOVE_IMAGE, PerturbationOptions
from vgr_trl.signals.perturbation import (
    PERTURBATIONS,
    add_gaussian_noise,
    blacken_patches,
    derive_seed,
    gaussian_blur,
    mask_image,
    perturb_images,
)
from vgr_trl.utils import ConfigError, DataError

KNOWN_PATTERN = [".##....#", "#.#..##."]
WIDE = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", *WIDE)


def draw(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A random image; a palette image has 256 colours, and no black."""
    generator = np.random.default_rng(seed)
    if mode == "1":
        return Image.fromarray(generator.integers(0, 2, size[::-1]).astype(bool)) if min(size) else Image.new("1", size)
    values = np.asarray(Image.new(mode, size))
    drawn = generator.uniform(0, 200, values.shape).astype(values.dtype)
    image = Image.frombytes(mode, size, drawn.tobytes())
    if mode in ("P", "PA"):
        image.putpalette([part for i in range(256) for part in (i, 255 - i // 2, 40)])
    return image


def seen(image: Image.Image) -> np.ndarray:
    """What the image shows, (height, width, 4): red, green, blue, opacity, in 0 to 255; modes I and F as they are."""
    if image.mode in WIDE:
        grey = np.asarray(image).astype(float) / (257 if image.mode.startswith("I;16") else 1)
        return np.stack([grey, grey, grey, np.full_like(grey, 255)], axis=-1)
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX"):
        image = image.convert("RGB")
    return np.asarray(image.convert("RGBA")).astype(float)


def call(name, image, **parameters):
    seeded = {"seed": 0} if name not in ("gaussian_blur", "mask_image") else {}
    return PERTURBATIONS[name](image, **{**seeded, **parameters})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(1, 1), (13, 29), (0, 0), (0, 5)])
def test_every_mode_and_size_is_kept_and_the_image_given_stays_as_it_was(mode, size):
    image = draw(mode, size)
    before, palette = image.tobytes(), image.getpalette()
    for name in PERTURBATIONS:
        result = call(name, image)
        assert (result.mode, result.size) == (mode, size), name
        assert result is not image
        result.load()
    assert image.tobytes() == before
    assert image.getpalette() == palette


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    seed=st.integers(0, 2**128),
    patch_size=st.integers(1, 60),
)
def test_a_square_is_opaque_black_or_untouched(mode, width, height, seed, patch_size):
    image = draw(mode, (width, height))
    result = blacken_patches(image, patch_size=patch_size, seed=seed)
    before, after = seen(image), seen(result)
    for top, left in itertools.product(range(0, height, patch_size), range(0, width, patch_size)):
        square = np.s_[top : top + patch_size, left : left + patch_size]
        is_black = np.abs(after[square] - (0, 0, 0, 255)).max() <= 1  # Pillow converts LAB black to (1, 0, 1)
        assert is_black or np.abs(after[square] - before[square]).max() == 0


@pytest.mark.parametrize("mode", MODES)
def test_black_is_opaque_black(mode):
    result = blacken_patches(draw(mode, (29, 13)), black_prob=1.0, seed=0)
    assert np.abs(seen(result) - (0, 0, 0, 255)).max() <= (1 if mode == "LAB" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_black_with_probability_0(mode):
    image = draw(mode, (29, 13))
    assert (seen(blacken_patches(image, black_prob=0.0, seed=0)) == seen(image)).all()


def test_squares_are_cut_off_at_the_right_and_lower_edge():
    """Width 30 and height 20 in squares of 14: columns 0-13, 14-27, 28-29 and rows 0-13, 14-19."""
    image = Image.new("L", (30, 20), 200)
    patterns = set()
    for seed in range(200):
        result = np.asarray(blacken_patches(image, seed=seed))
        squares = [result[rows, columns] for rows in np.s_[:14, 14:] for columns in np.s_[:14, 14:28, 28:]]
        assert all(len(set(square.ravel())) == 1 for square in squares)
        patterns.add(tuple(int(square[0, 0]) for square in squares))
    assert len(patterns) > 50, "squares are blackened independently: 64 patterns exist"


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.9])
def test_share_of_black_squares(probability):
    """10,000 squares: the share's standard deviation is at most 0.005."""
    result = blacken_patches(Image.new("L", (1400, 1400), 255), black_prob=probability, seed=1)
    assert np.mean(np.asarray(result) == 0) == pytest.approx(probability, abs=0.02)


def test_black_in_a_palette_that_has_it_changes_no_colour():
    image = Image.new("P", (28, 14), 1)
    image.putpalette([9, 9, 9, 250, 0, 0, 0, 0, 0])
    result = blacken_patches(image, black_prob=1.0, seed=0)
    assert result.getpalette() == image.getpalette()
    assert set(result.tobytes()) == {2}


def test_transparent_black_in_a_palette_is_not_used_as_black():
    image = Image.new("P", (14, 14), 1)
    image.putpalette([0, 0, 0, 250, 0, 0])
    for transparency in (0, b"\x00\xff"):
        image.info["transparency"] = transparency
        assert (seen(blacken_patches(image, black_prob=1.0, seed=0)) == (0, 0, 0, 255)).all()
        assert (seen(blacken_patches(image, black_prob=0.0, seed=0)) == (250, 0, 0, 255)).all()


def test_full_palette_gives_up_its_rarest_colour():
    """256 colours in 16 x 17 pixels: 0 to 15 stand there twice, 16 is the first of those that stand there once."""
    image = Image.new("P", (16, 17))
    image.putdata([*range(256), *range(16)])
    image.putpalette([part for i in range(256) for part in (i, 100, 100)])
    result = blacken_patches(image, patch_size=1, black_prob=0.0, seed=0)
    red = np.asarray(result.convert("RGB"))[..., 0].ravel()
    expected = np.array([*range(256), *range(16)])
    expected[16] = 15
    assert (red == expected).all()


@pytest.mark.parametrize(("mode", "key"), [("L", 0), ("RGB", (0, 0, 0)), ("1", 0)])
def test_a_colour_marked_as_transparent_is_opaque_once_painted(mode, key):
    image = Image.new(mode, (14, 14), 255 if mode != "RGB" else (255, 255, 255))
    image.info["transparency"] = key
    assert (seen(blacken_patches(image, black_prob=1.0, seed=0)) == (0, 0, 0, 255)).all()


def test_other_transparency_and_the_rest_of_the_information_stay():
    image = Image.new("RGB", (14, 14), (9, 9, 9))
    image.info = {"transparency": (9, 9, 9), "dpi": (72, 72)}
    for name in PERTURBATIONS:
        assert call(name, image).info == image.info


def test_transparency_by_colour_of_a_palette_stays():
    """Each colour of the palette has its own; Pillow warns where it is dropped on the way to RGB."""
    image = draw("RGB", (8, 8)).quantize(4)
    image.info["transparency"] = bytes([0, 80, 160, 255])
    noisy = add_gaussian_noise(image, std=5, seed=0)
    assert noisy.mode == "P"
    alpha = [np.asarray(one.convert("RGBA").getchannel("A")) for one in (image, noisy)]
    assert len(np.unique(alpha[0])) == 4
    np.testing.assert_allclose(alpha[0], alpha[1], atol=2)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "I", "F", "I;16", "I;16B"])
def test_noise_has_the_standard_deviation_asked_for(mode):
    """Grey 128 and noise of 10: 90,000 values per channel, whose mean has a standard deviation of 0.03."""
    scale = 257 if mode.startswith("I;16") else 1
    image = mask_image(Image.new(mode, (300, 300)), value=128)
    if mode in ("I", "F"):
        image = Image.new(mode, (300, 300), 128)
    noise = (np.asarray(add_gaussian_noise(image, std=10, seed=3)).astype(float) - np.asarray(image)) / scale
    if mode == "CMYK":
        noise = noise[..., 3]
    assert noise.mean() == pytest.approx(0, abs=0.15)
    assert noise.std() == pytest.approx(10, abs=0.15)


def test_noise_of_different_channels_and_pixels_is_independent():
    image = Image.new("RGB", (200, 200), (128, 128, 128))
    noise = np.asarray(add_gaussian_noise(image, std=20, seed=0)).astype(float) - 128
    channels = np.corrcoef(noise.reshape(-1, 3).T)
    assert np.abs(channels - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(noise[:, 1:, 0].ravel(), noise[:, :-1, 0].ravel())[0, 1]) < 0.03


def test_strong_noise_is_clipped_and_not_wrapped():
    """std 189 on grey 128: P(value <= 0) = P(z < -0.675) = 0.25, and 0.25 above 255."""
    values = np.asarray(add_gaussian_noise(Image.new("L", (300, 300), 128), seed=0))
    assert np.mean(values == 0) == pytest.approx(0.25, abs=0.01)
    assert np.mean(values == 255) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA", "La", "RGBa"])
@pytest.mark.parametrize("name", ["add_gaussian_noise", "gaussian_blur"])
def test_transparency_stays(mode, name):
    image = draw(mode, (29, 13))
    if mode in ("La", "RGBa"):
        image = draw({"La": "LA", "RGBa": "RGBA"}[mode], (29, 13)).convert(mode)
    band = image.getbands()[-1]
    result = call(name, image)
    assert (np.asarray(result.getchannel(band)) == np.asarray(image.getchannel(band))).all()
    assert result.tobytes() != image.tobytes()


def test_noise_on_a_transparent_palette_keeps_transparent_pixels_transparent():
    image = Image.new("P", (28, 14), 1)
    image.paste(0, (0, 0, 14, 14))
    image.putpalette([0, 0, 0, 250, 120, 0])
    image.info["transparency"] = 0
    opacity = seen(add_gaussian_noise(image, std=30, seed=0))[..., 3]
    assert (opacity[:, :14] == 0).all()
    assert (opacity[:, 14:] == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "CMYK", "I", "F", "I;16", "I;16B", "LA", "RGBA"])
def test_no_noise_and_no_blur_change_nothing(mode):
    image = draw(mode, (29, 13))
    assert add_gaussian_noise(image, std=0, seed=0).tobytes() == image.tobytes()
    assert gaussian_blur(image, radius=0).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("1", "P", "PA")])
def test_blurring_one_colour_changes_nothing(mode):
    image = mask_image(Image.new(mode, (29, 13)), value=90)
    assert np.abs(seen(gaussian_blur(image)) - seen(image)).max() <= 1


@pytest.mark.parametrize(("mode", "white"), [("L", 255), ("F", 1.0), ("F", 255.0), ("I;16", 65535), ("I", 65535)])
def test_blur_spreads_a_line_as_a_gaussian_of_that_radius(mode, white):
    """A white column of 1 pixel: the variance across it is radius^2 = 16; Pillow's own blur approximates it."""
    image = Image.new(mode, (81, 9), 0)
    image.paste(white, (40, 0, 41, 9))
    row = np.asarray(gaussian_blur(image, radius=4)).astype(float)[4]
    distance = np.arange(81) - 40
    assert (row * distance).sum() / row.sum() == pytest.approx(0, abs=0.05)
    assert (row * distance**2).sum() / row.sum() == pytest.approx(16, rel=0.05)


def test_blur_of_wide_images_agrees_with_pillow_for_narrow_ones():
    image = draw("L", (60, 50))
    narrow = np.asarray(gaussian_blur(image, radius=3)).astype(float)
    wide = np.asarray(gaussian_blur(image.convert("F"), radius=3))
    assert np.abs(narrow - wide).mean() < 1.5
    assert np.abs(np.asarray(image).astype(float) - wide).mean() > 20


def test_blur_much_wider_than_the_image_shows_the_mean_of_its_edges():
    """Beyond the edges the columns go on with 1000 and 3000 for ever."""
    image = Image.fromarray(np.repeat(np.where(np.arange(20) < 10, 1000, 3000)[None], 20, axis=0).astype(np.uint16))
    assert image.mode == "I;16"
    values = np.asarray(gaussian_blur(image, radius=1e5))
    assert np.abs(values.astype(float) - 2000).max() <= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [0, 128, 255])
def test_mask_is_one_opaque_grey(mode, value):
    image = draw(mode, (13, 29))
    expected = value if mode != "1" else (255 if value >= 128 else 0)
    if mode == "F":  # values up to 200, so white is 255
        assert set(np.asarray(mask_image(image, value=value)).ravel()) == {value}
        return
    result = seen(mask_image(image, value=value))
    assert np.abs(result - (expected, expected, expected, 255)).max() <= (1 if mode in ("LAB", "YCbCr") else 0)


def test_grey_in_images_that_do_not_say_what_white_is():
    for largest, grey in ((0.5, 128 / 255), (200.0, 128.0), (40000.0, 128 * 257.0), (1e6, 1e6 * 128 / 255)):
        image = Image.new("F", (3, 3), largest)
        assert mask_image(image).getpixel((1, 1)) == pytest.approx(grey)
    assert mask_image(Image.new("I", (3, 3), 40000)).getpixel((1, 1)) == 128 * 257


@pytest.mark.parametrize("name", ["blacken_patches", "add_gaussian_noise"])
def test_a_seed_repeats_exactly_and_another_differs(name):
    image = draw("RGB", (100, 80))
    first, again, other = (PERTURBATIONS[name](image, seed=seed).tobytes() for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_images_of_a_prompt_get_streams_of_their_own_that_depend_on_nothing_else():
    image = Image.new("L", (140, 140), 255)
    made = {}
    for seed, step, index in itertools.product((0, 1), (0, 1, 2), (0, 1, 2)):
        for place, result in enumerate(
            perturb_images([image] * 3, "blacken_patches", seed=seed, step=step, index=index)
        ):
            made[seed, step, index, place] = result.tobytes()
    assert len(set(made.values())) == len(made) == 54
    alone = perturb_images([image], "blacken_patches", {}, seed=1, step=2, index=0)[0].tobytes()
    assert alone == made[1, 2, 0, 0], "the first image does not depend on how many there are, nor on what came before"
    assert alone == blacken_patches(image, seed=derive_seed(1, 2, 0)).tobytes()


def test_seeds_do_not_collide():
    numbers = (0, 1, 2, 255, 2**31, 2**32 - 1)
    assert len({derive_seed(*four) for four in itertools.product(numbers, repeat=4)}) == 6**4


def test_a_plug_in_may_draw_on_the_image_that_it_is_given(monkeypatch):
    def scribble(image):
        image.putpixel((0, 0), 255)
        return image

    monkeypatch.setitem(registries.perturbations._own, "scribble", scribble)
    image = Image.new("L", (2, 2))
    perturbed = perturb_images([image], "scribble", seed=0, step=0, index=0)[0]
    assert (image.getpixel((0, 0)), perturbed.getpixel((0, 0))) == (0, 255)


def test_known_pattern():
    """Pinned: a run repeats on another machine and with another version of this library."""
    image = Image.new("L", (8, 2), 255)
    result = perturb_images([image], "blacken_patches", {"patch_size": 1}, seed=42, step=3, index=7)[0]
    assert ["".join("#" if value == 0 else "." for value in row) for row in np.asarray(result)] == KNOWN_PATTERN


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_the_options_of_a_run_are_accepted(name):
    assert (*PERTURBATIONS, REMOVE_IMAGE) == NAMES
    parameters = PerturbationOptions(perturbation=name).parameters_of(name)
    assert len(perturb_images([Image.new("L", (1, 1))], name, parameters, seed=0, step=0, index=0)) == 1


def test_perturbations_are_chosen_by_name_with_parameters():
    image = draw("RGB", (30, 30))
    chosen = perturb_images([image, image], "mask_image", {"value": 7}, seed=0, step=0, index=0)
    assert [set(result.tobytes()) for result in chosen] == [{7}, {7}]
    blurred = perturb_images([image], "gaussian_blur", {"radius": 2.0}, seed=0, step=0, index=0)[0]
    assert blurred.tobytes() == gaussian_blur(image, radius=2.0).tobytes()
    assert perturb_images([], "gaussian_blur", seed=0, step=0, index=0) == []


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "darken",
            {},
            "There is no perturbation 'darken': give one of add_gaussian_noise, blacken_patches, crop_image, diffusio",
        ),
        ("mask_image", {"seed": 1}, "The perturbation mask_image got the parameter 'seed': it accepts value."),
        (
            "blacken_patches",
            {"size": 1},
            "The perturbation blacken_patches got the parameter 'size': it accepts patch_s",
        ),
        ("blacken_patches", {"patch_size": 0}, "patch_size is 0: give an integer of at least 1."),
        ("blacken_patches", {"patch_size": 1.5}, "patch_size is 1.5: give an integer of at least 1."),
        ("blacken_patches", {"black_prob": 1.1}, "black_prob is 1.1: give a number in [0, 1]."),
        ("blacken_patches", {"black_prob": float("nan")}, "black_prob is nan: give a number in [0, 1]."),
        ("add_gaussian_noise", {"std": -1}, "std is -1: give a number in [0, 1e6]."),
        ("gaussian_blur", {"radius": float("inf")}, "radius is inf: give a number in [0, 1e6]."),
        ("mask_image", {"value": 256}, "value is 256: give a number in [0, 255]."),
        ("mask_image", {"value": 0.5}, "value is 0.5: give an integer of at least 0."),
    ],
)
def test_wrong_parameters(name, parameters, message):
    with pytest.raises(ConfigError) as used:
        perturb_images([Image.new("L", (1, 1))], name, parameters, seed=0, step=0, index=0)
    assert str(used.value).startswith(message)


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_what_is_no_image(name):
    with pytest.raises(DataError, match=r"^A perturbation got a value of type ndarray: give a PIL image\.$"):
        call(name, np.zeros((3, 3)))


@pytest.mark.parametrize("name", ["seed", "step", "index"])
def test_numbers_of_the_stream_that_are_none(name):
    numbers = {"seed": 0, "step": 0, "index": 0, name: -1}
    with pytest.raises(ConfigError, match=rf"^{name} is -1: give an integer of at least 0\.$"):
        perturb_images([Image.new("L", (1, 1))], "blacken_patches", **numbers)


def test_seed_of_a_single_image_that_is_none():
    with pytest.raises(ConfigError, match=r"^seed is -1: give an integer of at least 0\.$"):
        blacken_patches(Image.new("L", (1, 1)), seed=-1)
