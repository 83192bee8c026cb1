from pathlib import Path

import pytest
import torch
import yaml

from vgr_trl.batch import Batch
from vgr_trl.errors import DataError
from vgr_trl.pixels import PERTURBED, RowImages, UnknownParts, parts_by_tokens
from vgr_trl.trl_bridge import from_scoring

IMAGE, PAD = 2, 9
TABLE = yaml.safe_load(Path(__file__).with_name("batch_rows.yaml").read_text(encoding="utf-8"))
CASES = TABLE["cases"]


def made(given):
    return torch.tensor(TABLE["values"][given]) if isinstance(given, str) else torch.zeros(given)


def placeholders(rows):
    length = max(map(len, rows))
    return torch.tensor([[character == "x" for character in row.ljust(length)] for row in rows])


def sizes(parts):
    for slices in parts.values():
        assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    return {name: [part.stop - part.start for part in slices] for name, slices in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_counts_and_tokens_give_the_same_parts(case):
    shapes, rows, num_images, num_tiles, entries = CASES[case]
    inputs = {name: made(given) for name, given in shapes.items()}
    expected = entries if isinstance(entries, dict) else dict.fromkeys(inputs, entries)
    assert sizes(RowImages(inputs, num_images, num_tiles).slices) == expected
    assert sizes(parts_by_tokens(inputs, placeholders(rows))) == expected


@pytest.mark.parametrize(("shapes", "rows"), TABLE["uncertain"])
def test_tokens_do_not_assign_pixels_without_certainty(shapes, rows):
    with pytest.raises(UnknownParts):
        parts_by_tokens({name: made(given) for name, given in shapes.items()}, placeholders(rows))


def test_other_pixels_of_a_row_that_was_padded_to_a_larger_one():
    """Processors pad to the largest image of their call."""
    images = RowImages({"pixel_values": torch.zeros(2, 1, 4, 6), "image_sizes": torch.tensor([[2, 3], [4, 6]])}, [1, 1])
    first, size = images.take([0]).with_pixels(torch.zeros(1, 1, 4, 6), PERTURBED), torch.tensor([[2, 3]])
    changed = first.with_pixels_of(RowImages({"pixel_values": torch.ones(1, 1, 2, 3), "image_sizes": size}, [1]))
    assert changed.tensors["pixel_values"].shape == (1, 1, 4, 6)
    assert changed.tensors["pixel_values"].sum() == changed.tensors["pixel_values"][..., :2, :3].sum() == 6
    for smaller in ({"image_sizes": size - 1}, {}):
        with pytest.raises(DataError):
            first.with_pixels_of(RowImages({"pixel_values": torch.ones(1, 1, 1, 2), **smaller}, [1]))


def test_an_input_that_no_pass_takes_is_not_left_out():
    ids = torch.ones(2, 6, dtype=torch.int64)
    with pytest.raises(DataError, match="pixel_mask"):
        from_scoring(ids, ids, 2, {"pixel_mask": torch.ones(2, 3), "num_images": [1, 1]})


def test_perturbed_pixels_take_no_part_in_scoring():
    images = RowImages({"pixel_values": torch.zeros(2, 3, 4, 4)}, [1, 1]).with_pixels(torch.ones(2, 3, 4, 4), PERTURBED)
    ids = torch.ones(2, 3, dtype=torch.int64)
    batch = Batch(ids, ids, ids, ids, images)
    assert [*batch.take([1]).to_score.images.tensors] == [*batch.to_score.images.tensors] == ["pixel_values"]
