"""Which tokens have a loss, which part of a micro-batch runs for them, and which rows run together."""

import torch

from vgr_trl.passes.loss_mask import (
    Extent,
    Window,
    count_tokens,
    find_loss_mask,
    find_window,
    group_by_length,
    pack_rows,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
PROMPTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])


def test_tokens_with_loss():
    advantages = torch.tensor([0.0, -1.0, float("nan"), 2.0])
    found = find_loss_mask(advantages, MASK, rows=True, tokens=True)
    assert found.int().tolist() == [[0] * 4, [1, 1, 0, 0], [1] * 4, [0] * 4]
    assert torch.equal(find_loss_mask(advantages, MASK, rows=False, tokens=False), MASK.bool())
    advantages = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0] * 4, [1.0] * 4])
    assert find_loss_mask(advantages, MASK, rows=True, tokens=True).nonzero().tolist() == [[0, 1]]
    assert find_loss_mask(advantages, MASK, rows=True, tokens=False).nonzero().tolist() == [[0, 0], [0, 1], [0, 2]]


LOSS_MASK = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()


def test_the_window_ends_with_the_last_token_with_loss_and_begins_with_the_longest_prompt():
    """An image stays if there was one."""
    assert find_window(LOSS_MASK, PROMPTS, rows=True, padding=True) == Window([0], 2, 2)
    assert find_window(LOSS_MASK, PROMPTS, rows=False, padding=True) == Window([0, 1, 2, 3], 4, 2)
    assert find_window(LOSS_MASK, PROMPTS, rows=True, padding=False) == Window([0], 4, 4)
    assert find_window(LOSS_MASK, PROMPTS, rows=True, padding=True, multiple=3) == Window([0], 3, 3)
    assert find_window(LOSS_MASK, PROMPTS, [0, 1, 1, 0], rows=True, padding=True) == Window([0, 1], 3, 2)
    assert find_window(LOSS_MASK, PROMPTS, [1, 1, 0, 0], rows=True, padding=True) == Window([0], 2, 2)
    assert find_window(LOSS_MASK & False, PROMPTS, [0, 0, 1, 0], rows=True, padding=True) == Window([2], 4, 1)


def test_groups_stand_by_their_longest_row_and_rows_within_them_likewise():
    groups, lengths = [0, 0, 1, 1, 2, 2], [3, 5, 0, 0, 4, 9]
    assert group_by_length([2, 0, 4, 3, 1, 5], groups, lengths, window=6) == [5, 4, 1, 0, 2, 3]
    assert group_by_length([2, 0, 4, 3, 1, 5], groups, lengths, window=3) == [4, 0, 2, 5, 1, 3], "steps of their own"


def test_parts_of_at_most_so_many_tokens():
    """Two rows of a prompt of 10: 10 + 2 * 4 = 18 tokens where it is shared, 2 * (10 + 4) = 28 where it is not.

    All rows, the prompt of 6 made as wide as that of 10: 2 * 10 + 4 * 4 = 36.
    """
    extents = [Extent(10, 4, True), Extent(10, 2, True), Extent(6, 4, True), Extent(6, 0, False), Extent(6, 4, True)]

    def parts(groups, most):
        return pack_rows(5, lambda rows: count_tokens(rows, extents, groups), most)

    groups = [0, 0, 1, 1, 1]
    assert parts(groups, 18) == [[0, 1], [2, 3, 4]]
    assert parts(groups, 17) == [[0], [1], [2, 3, 4]]
    assert parts(None, 28) == [[0, 1], [2, 3, 4]]
    assert parts(None, 1) == [[0], [1], [2, 3], [4]]
    assert parts(groups, 35) == [[0, 1, 2, 3], [4]]
    assert parts(groups, 36) == [[0, 1, 2, 3, 4]]
