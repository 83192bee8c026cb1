import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.data.merge import Row, interleaved, sharing_images, split, weighted, without_duplicates
from vgr_trl.utils import DataError


def row(position, images="a", problem="p", answer="x", choices=(), source=0) -> Row:
    return Row(source, position, tuple(images), problem, answer, frozenset(choices))


def places(rows):
    return [(found.source, found.position) for found in rows]


def test_the_first_of_equal_rows_stays():
    rows = [row(0), row(1, "b"), row(2), row(3, problem="q"), row(4, source=1)]
    kept, reasons = without_duplicates(rows)
    assert places(kept) == [(0, 0), (0, 1), (0, 3)]
    assert places(reasons) == [(0, 2), (1, 4)]
    assert set(reasons.values()) == {"it has the same image and question as an earlier row"}


@pytest.mark.parametrize(
    ("one", "other", "contradict"),
    [
        (("x", ()), ("x", ()), False),
        (("x", ()), ("y", ()), True),
        (("x", "xy"), ("y", "xy"), True),
        (("x", "xyz"), ("y", "wxy"), True),
        (("x", "xy"), ("z", "zw"), False),  # neither offers the other's answer: both can be right
        (("x", "xy"), ("y", ()), False),  # the open answer says y where x was offered beside it: not comparable
    ],
)
def test_rows_that_contradict_each_other_are_both_left_out(one, other, contradict):
    rows = [row(0, answer=one[0], choices=one[1]), row(1, answer=other[0], choices=other[1])]
    kept, reasons = without_duplicates(rows)
    assert len(kept) == (0 if contradict else 1)
    assert len(reasons) == (2 if contradict else 1)
    if contradict:
        assert set(reasons.values()) == {"another row with the same image and question has another answer"}


def test_weights_by_hand():
    """30 and 12 rows at 2 : 1: the twelve limit, so 24 to 12. At 1 : 1: twelve each. At 5 : 1: thirty to six."""
    rows = [row(n, [f"a{n}"]) for n in range(30)] + [row(n, [f"b{n}"], source=1) for n in range(12)]
    for weights, expected in (((2, 1), [24, 12]), ((1, 1), [12, 12]), ((5, 1), [30, 6]), ((100, 1), [30, 1])):
        kept = weighted(rows, weights, seed=0)
        assert [sum(found.source == number for found in kept) for number in (0, 1)] == expected
        assert kept == [found for found in rows if found in kept]  # order stays
    assert weighted(rows, None, seed=0) == rows


def test_what_weights_leave_depends_on_the_seed_and_the_content_alone():
    rows = [row(n, [f"a{n}"]) for n in range(30)] + [row(n, [f"b{n}"], source=1) for n in range(5)]
    kept = {found.images for found in weighted(rows, (1, 1), seed=0)}
    moved = [row(29 - found.position, found.images, source=found.source) for found in rows]
    assert {found.images for found in weighted(moved, (1, 1), seed=0)} == kept
    assert {found.images for found in weighted(rows, (1, 1), seed=1)} != kept


def test_no_weight_for_a_set_without_rows():
    with pytest.raises(DataError, match="Source 2 has no row that can be used, so no weight can be given to it."):
        weighted([row(0)], (1, 1), seed=0)


ROWS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=2, max_size=40)


@given(images=ROWS, share=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_no_image_is_on_both_sides(images, share, seed):
    rows = [row(number, [str(image) for image in shown]) for number, shown in enumerate(images)]
    try:
        train, test = split(rows, share, seed)
    except DataError:
        assert len(sharing_images(rows)) == 1  # only where everything hangs together
        return
    assert train
    assert test
    assert sorted(places(train + test)) == places(rows)
    assert not {image for found in train for image in found.images} & {
        image for found in test for image in found.images
    }


def test_the_share_is_met_exactly_where_no_image_is_shared():
    rows = [row(number, [str(number)]) for number in range(200)]
    train, test = split(rows, 0.1, seed=0)
    assert (len(train), len(test)) == (180, 20)
    assert split(rows, 0.1, seed=0) == (train, test)
    assert set(split(rows[::-1], 0.1, seed=0)[1]) == set(test)
    assert set(split(rows, 0.1, seed=1)[1]) != set(test)
    assert split(rows, 0, seed=0) == (rows, [])
    assert [len(side) for side in split(rows[:2], 0.75, seed=0)] == [1, 1]  # one and a half rows round to all


def test_rows_are_linked_over_others():
    rows = [row(0, "ab"), row(1, "c"), row(2, "bd"), row(3, "d"), row(4, "ce")]
    assert [places(group) for group in sharing_images(rows)] == [[(0, 0), (0, 2), (0, 3)], [(0, 1), (0, 4)]]
    with pytest.raises(DataError, match="The 2 rows cannot be split, for all are linked by images they share"):
        split(rows[2:4], 0.5, seed=0)


def test_sources_are_spread_evenly():
    rows = [row(n) for n in range(4)] + [row(n, source=1) for n in range(2)]
    # Places (n + 1/2) / count: 1/8, 3/8, 5/8, 7/8 and 1/4, 3/4.
    assert places(interleaved(rows)) == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
