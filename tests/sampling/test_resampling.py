import itertools

import pytest

from vgr_trl.sampling import FurtherPrompts, Placement, prompts_of_round, rows_of_process


@pytest.mark.parametrize(
    ("missing", "generations", "processes", "expected"),
    [(3, 8, 1, 3), (3, 8, 8, 3), (3, 8, 4, 3), (1, 4, 8, 2), (3, 4, 8, 4), (1, 8, 3, 3), (4, 8, 3, 6), (5, 6, 4, 6)],
)
def test_prompts_of_a_round_are_shared_equally(missing, generations, processes, expected):
    count = prompts_of_round(missing, generations, processes)
    assert count == expected
    assert count * generations % processes == 0


@pytest.mark.parametrize(("generations", "processes"), [(2, 1), (4, 2), (4, 8), (8, 3), (3, 2)])
def test_rows_of_all_processes_are_g_adjacent_ones_per_prompt(generations, processes):
    prompts = [{"prompt": index} for index in range(prompts_of_round(5, generations, processes))]
    shares = [rows_of_process(prompts, generations, process, processes) for process in range(processes)]
    assert len({len(share) for share in shares}) == 1
    found = [row["prompt"] for row in itertools.chain(*shares)]
    assert found == [index for index in range(len(prompts)) for _ in range(generations)]
    distinct = {id(row) for row in itertools.chain(*shares)}
    assert len(distinct) == len(found), "TRL writes into rows"


class Stream:
    """Rows that can only be read from the start."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(rows(self.length))


def rows(count):
    return [{"prompt": str(number)} for number in range(count)]


def drawn(prompts, count, step=0):
    prompts._taken.clear()
    return [int(row["prompt"]) for row in prompts.draw(count, Placement(4, 1), step)[0]]


def test_each_pass_over_the_data_is_another_permutation():
    prompts = FurtherPrompts(rows(10), seed=4)
    passes = [drawn(prompts, 10) for _ in range(3)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0] != drawn(FurtherPrompts(rows(10), seed=5), 10)


def test_no_more_than_there_are():
    prompts = FurtherPrompts(rows(5))
    prompts.begin(rows(4), Placement(4, 1))
    assert [row["prompt"] for row in prompts.draw(3, Placement(4, 1), 0)[0]] == ["4"]
    assert prompts.draw(1, Placement(4, 1), 0) == ([], 0)


@pytest.mark.parametrize("dataset", [rows(7), Stream(7), Stream(200)], ids=["with a length", "short", "long"])
@pytest.mark.parametrize("before", [1, 7, 20])
def test_they_continue_after_an_interruption(dataset, before, tmp_path):
    whole = FurtherPrompts(dataset, seed=1)
    drawn(whole, before)
    whole.save(tmp_path)
    again = FurtherPrompts(dataset, seed=1)
    again.load(tmp_path)
    assert [drawn(again, 2, 1), drawn(again, 5, 2)] == [drawn(whole, 2, 1), drawn(whole, 5, 2)]


def test_a_long_stream_is_read_ahead_of_the_epoch():
    """32 rollouts of 3 rows ahead; the epoch has got to row 30 after 10 rollouts."""
    prompts = FurtherPrompts(Stream(1000), batch=3)
    assert drawn(prompts, 2) == [96, 97]
    assert drawn(prompts, 2, 1) == [99, 100]
    assert drawn(prompts, 2, 10) == [126, 127]
    assert drawn(prompts, 80, 11) == list(range(129, 209))
    assert drawn(prompts, 2, 11) == [209, 210], "what comes within 32 rollouts only is left out"
