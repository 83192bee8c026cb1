import itertools

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from vgr_trl import registries
from vgr_trl.config import PERTURBATIONS, REMOVE_IMAGE
from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.data.images import ImageLimits
from vgr_trl.errors import DataError
from vgr_trl.signals import perturbation as perturbed

KNOWN_PATTERN = [".##....#", "#.#..##."]
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


def draw(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A random image; a palette image has 256 colours, and no black."""
    generator = np.random.default_rng(seed)
    if mode == "1":
        return Image.fromarray(generator.integers(0, 2, size[::-1]).astype(bool))
    values = np.asarray(Image.new(mode, size))
    drawn = generator.uniform(0, 200, values.shape).astype(values.dtype)
    image = Image.frombytes(mode, size, drawn.tobytes())
    if mode == "P":
        image.putpalette([part for i in range(256) for part in (i, 255 - i // 2, 40)])
    return image


UNSEEDED = ("gaussian_blur", "mask_image", "lower_resolution", "compress_jpeg")


def call(name, image, **parameters):
    seeded = {"seed": 0} if name not in UNSEEDED else {}
    return registries.perturbations.load(name)(image, **{**seeded, **parameters})


@pytest.mark.parametrize("mode", MODES)
def test_mode_and_size_are_kept_and_the_image_itself_stays_as_it_was(mode):
    image = draw(mode, (13, 29))
    before, palette = image.tobytes(), image.getpalette()
    for name in PERTURBATIONS.keys() - {REMOVE_IMAGE}:
        result = call(name, image)
        assert (result.mode, result.size) == (mode, image.size), name
        assert result is not image
        result.load()
    if mode != "YCbCr":
        black = perturbed.blacken_patches(image, black_prob=1.0, seed=0).convert("RGBA")
        assert (np.asarray(black) == (0, 0, 0, 255)).all()
        for value in (0, 100, 255) if mode != "1" else (0, 255):
            grey = perturbed.mask_image(image, value=value).convert("RGBA")
            assert (np.asarray(grey) == (value, value, value, 255)).all()
    assert image.tobytes() == before
    assert image.getpalette() == palette


def test_noise_has_the_standard_deviation_asked_for():
    """Grey 128 and noise of 10: 90,000 values per channel, whose mean has a standard deviation of 0.03."""
    image = perturbed.mask_image(Image.new("RGB", (300, 300)), value=128)
    noise = np.asarray(perturbed.add_gaussian_noise(image, std=10, seed=3)).astype(float) - np.asarray(image)
    assert noise.mean() == pytest.approx(0, abs=0.15)
    assert noise.std() == pytest.approx(10, abs=0.15)
    strong = np.asarray(perturbed.add_gaussian_noise(Image.new("L", (300, 300), 128), seed=0))  # P(z < -0.675) = 0.25
    assert np.mean(strong == 0) == pytest.approx(0.25, abs=0.01), "clipped, and not wrapped"


def test_images_of_a_prompt_get_streams_of_their_own_that_depend_on_nothing_else():
    image = Image.new("L", (140, 140), 255)
    made = {}
    for seed, step, index in itertools.product((0, 1), (0, 1, 2), (0, 1, 2)):
        results = perturbed.perturb_images([image] * 3, "blacken_patches", seed=seed, step=step, index=index)
        made |= {(seed, step, index, place): result.tobytes() for place, result in enumerate(results)}
    assert len(set(made.values())) == len(made) == 54
    alone = perturbed.perturb_images([image], "blacken_patches", {}, seed=1, step=2, index=0)[0].tobytes()
    assert alone == made[1, 2, 0, 0], "the first image does not depend on how many there are, nor on what came before"
    assert alone == perturbed.blacken_patches(image, seed=perturbed.derive_seed(1, 2, 0)).tobytes()
    # Pinned: a run repeats on another machine and with another version of this library.
    small = image.crop((0, 0, 8, 2))
    (result,) = perturbed.perturb_images([small], "blacken_patches", {"patch_size": 1}, seed=42, step=3, index=7)
    assert ["".join("#" if value == 0 else "." for value in row) for row in np.asarray(result)] == KNOWN_PATTERN


def test_grey_gets_darker_and_spreads():
    """After 250 steps 128 becomes 0.98913 · 128 = 126.6; the noise has a standard deviation of 0.14702 · 255 = 37.5."""
    assert perturbed.diffusion_signal(500) ** 0.5 == pytest.approx(0.8630172610282898, rel=2e-4)  # recorded
    assert perturbed.diffusion_signal(999) ** 0.5 == pytest.approx(0.28504252433776855, rel=2e-4)  # recorded
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    after = np.asarray(perturbed.diffusion_noise(grey, steps=250, seed=3), float)
    assert after.mean() == pytest.approx(0.98913 * 128, abs=0.5)
    assert after.std() == pytest.approx(0.14702 * 255, rel=0.02)
    assert np.abs(np.corrcoef(after.reshape(-1, 3).T) - np.eye(3)).max() < 0.03, "each channel has noise of its own"
    strong = np.asarray(perturbed.diffusion_noise(grey, steps=999, seed=3))  # 0.285 · 128, deviation 0.9585 · 255
    shares = [np.mean(strong == edge) for edge in (0, 255)]
    assert shares == pytest.approx([0.441, 0.186], abs=0.01), "clipped, and not wrapped"


def test_squares_change_places_and_the_edge_stays():
    """2 x 2 squares of 2 pixels; the fifth column belongs to none."""
    image = Image.fromarray(np.arange(20, dtype=np.int32).reshape(4, 5))
    before = np.asarray(image)
    results = [np.asarray(perturbed.shuffle_patches(image, patch_size=2, seed=seed)) for seed in range(8)]
    squares = {before[y : y + 2, x : x + 2].tobytes() for y in (0, 2) for x in (0, 2)}
    for after in results:
        assert {after[y : y + 2, x : x + 2].tobytes() for y in (0, 2) for x in (0, 2)} == squares
        assert (after[:, 4] == before[:, 4]).all()
    assert len({after.tobytes() for after in results}) > 3


def test_a_quarter_of_the_area_is_shown_twice_as_large():
    """Of 4 x 4 pixels 2 x 2 are kept, each of which becomes 2 x 2."""
    image = Image.fromarray(np.arange(16, dtype=np.int32).reshape(4, 4))
    found = [np.asarray(perturbed.crop_image(image, share=0.25, seed=seed)) for seed in range(12)]
    for after in found:
        corner = int(after[0, 0])
        assert after[::2, ::2].tolist() == [[corner, corner + 1], [corner + 4, corner + 5]]
        assert (after[::2, ::2] == after[1::2, 1::2]).all()
    assert len({after.tobytes() for after in found}) > 3
    assert perturbed.crop_image(image, share=1.0, seed=0).tobytes() == image.tobytes()


def test_views_of_a_row_by_hand():
    """A box of 8 x 4 pixels at (8, 4) of 40 x 20 has a margin of 2; with another box, at the edge, one around both."""
    image = draw("RGB", (40, 20))
    boxes = [[0.2, 0.2, 0.4, 0.4]], [[0.2, 0.2, 0.4, 0.4], [0.9, 0.5, 1.0, 1.0]]
    (one,), (both,) = (
        perturbed.show_view([image], {"bbox": box}, "crop_to_box", {"crop_margin": margin}, seed=0).images
        for box, margin in zip(boxes, (0.25, 0.0), strict=True)
    )
    assert (one.tobytes(), both.tobytes()) == (
        image.crop((6, 2, 18, 10)).tobytes(),
        image.crop((8, 4, 40, 20)).tobytes(),
    )
    limits = {"crop_margin": 0.0, "crop_pixels": 8}
    (small,) = perturbed.show_view([image], {"bbox": boxes[0]}, "crop_to_box", limits, seed=0).images
    assert small.size == (4, 2)
    seen = perturbed.show_view([image], {"teacher_images": [one, image]}, "teacher_images", {}, seed=0)
    assert [each.size for each in seen.images] == [one.size, image.size]
    told = perturbed.show_view([image], {"privileged_context": "It is 7."}, "privileged_context", {}, seed=0)
    assert ([each.tobytes() for each in told.images], told.text) == ([image.tobytes()], "It is 7.")
    undefined = [({"bbox": None}, "crop_to_box"), ({}, "teacher_images"), ({"teacher_images": []}, "teacher_images")]
    undefined += [({"privileged_context": None}, "privileged_context")]
    assert [perturbed.show_view([image], row, view, {}, seed=0) for row, view in undefined] == [None] * 4
    assert perturbed.show_view([image] * 2, {"bbox": boxes[0]}, "crop_to_box", {}, seed=0) is None
    with pytest.raises(DataError):
        perturbed.show_view([image], {"teacher_images": "/etc/passwd"}, "teacher_images", {}, seed=0)


def test_images_of_a_teacher_come_from_the_data(tmp_path):
    """In full size, where the policy's are shrunk, and from the folder of the data alone."""
    for name in ("own.png", "other.png"):
        draw("RGB", (40, 20)).save(tmp_path / name)
    rows = [{"problem": "?", "solution": "x", "image": "own.png", "teacher_images": ["other.png", "own.png"]}] * 2
    limits = {"images": ImageLimits(max_pixels=200), "full_images": True}
    ready, _ = prepare_rows(Dataset.from_list(rows), root=tmp_path, **limits)
    row = ready[0]
    assert row["image"].size == (20, 10)
    for view, count in (("sharper", 1), ("teacher_images", 2)):
        seen = perturbed.show_view([row["image"]], row, view, {}, seed=0)
        assert [image.size for image in seen.images] == [(40, 20)] * count
    hostile = Dataset.from_list([{**rows[0], "teacher_images": ["../other.png"]}])
    with pytest.raises(DataError, match="is outside"):
        prepare_rows(hostile, root=tmp_path, **limits)[0][0]
