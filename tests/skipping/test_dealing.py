"""Which rows run together, as numbers."""

import torch

from vgr_trl.efficiency.loss_mask import Extent, extents_of, group_by_length, pack_rows, take_rows, tokens_of

GROUPS = [0, 0, 1, 1, 2, 2]
LENGTHS = [3, 5, 0, 0, 4, 9]


def test_groups_stand_by_their_longest_row_and_rows_within_them_likewise():
    assert group_by_length([2, 0, 4, 3, 1, 5], GROUPS, LENGTHS, window=6) == [5, 4, 1, 0, 2, 3]
    assert group_by_length([3, 2], GROUPS, LENGTHS, window=6) == [3, 2]


def test_rows_of_other_steps_keep_their_places():
    assert group_by_length([2, 0, 4, 3, 1, 5], GROUPS, LENGTHS, window=3) == [4, 0, 2, 5, 1, 3]


def test_parts_of_at_most_so_many_tokens():
    """Two rows of a prompt of 10: 10 + 2 * 4 = 18 tokens where it is shared, 2 * (10 + 4) = 28 where it is not.

    All rows, the prompt of 6 made as wide as that of 10: 2 * 10 + 4 * 4 = 36.
    """
    extents = [Extent(10, 4, True), Extent(10, 2, True), Extent(6, 4, True), Extent(6, 0, False), Extent(6, 4, True)]

    def parts(groups, most):
        return pack_rows(5, lambda rows: tokens_of(rows, extents, groups), most)

    groups = [0, 0, 1, 1, 1]
    assert parts(groups, 18) == [[0, 1], [2, 3, 4]]
    assert parts(groups, 17) == [[0], [1], [2, 3, 4]]
    assert parts(None, 28) == [[0, 1], [2, 3, 4]]
    assert parts(None, 1) == [[0], [1], [2, 3], [4]]
    assert parts(groups, 35) == [[0, 1, 2, 3], [4]]
    assert parts(groups, 36) == [[0, 1, 2, 3, 4]]


def test_what_runs_of_each_row():
    live = torch.tensor([[0, 1, 0], [0, 0, 0]]).bool()
    prompts = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert extents_of(live, prompts, rows=True, padding=True) == [Extent(3, 2, True), Extent(4, 0, False)]
    assert extents_of(live, prompts, rows=False, padding=False) == [Extent(4, 3, True), Extent(4, 3, True)]


def test_rows_of_a_batch_with_their_images():
    batch = {
        "prompt_ids": torch.arange(6).view(3, 2),
        "advantages": torch.tensor([1.0, 2.0, 3.0]),
        "num_items_in_batch": torch.tensor(7),
        "num_images": [1, 0, 2],
        "num_tiles": None,
        "pixel_values": torch.arange(3.0).view(3, 1, 1, 1),
        "perturbed_pixel_values": [torch.zeros(1), torch.zeros(0), torch.ones(2)],
    }
    part = take_rows(batch, [1, 2])
    assert part["prompt_ids"].tolist() == [[2, 3], [4, 5]]
    assert part["advantages"].tolist() == [2.0, 3.0]
    assert (part["num_items_in_batch"], part["num_images"], part["num_tiles"]) == (7, [0, 2], None)
    assert part["pixel_values"].flatten().tolist() == [1.0, 2.0]
    assert [len(pixels) for pixels in part["perturbed_pixel_values"]] == [0, 2]
    assert "pixel_values" not in take_rows(batch, [1])
