import itertools

import pytest

from vgr_trl.errors import DataError
from vgr_trl.sampling import PromptStream, Resampling, prompts_of_round, rows_of_process


def test_live_groups_of_further_rounds_fill_the_places_of_dead_ones():
    """Groups 1, 4, 6 and 7 are dead. Round one has 4 groups, one alive; round two 3, all alive, one of them fresh."""
    plan = Resampling([1, 4, 6, 7], max_rounds=3)
    assert plan.wants_more
    assert plan.take([2], 4) == {1: 2}
    assert plan.missing == [4, 6, 7]
    assert plan.take([0, 1, 2, 3], 4) == {4: 0, 6: 1, 7: 2}
    assert not plan.wants_more
    assert (plan.rounds, plan.generated, plan.used, plan.discarded) == (2, 8, 4, 4)


def test_rounds_are_limited():
    plan = Resampling([0, 2], max_rounds=2)
    for _ in range(2):
        assert plan.wants_more
        assert plan.take([], 2) == {}
    assert not plan.wants_more
    assert plan.missing == [0, 2]
    assert (plan.generated, plan.used, plan.discarded) == (4, 0, 4)


def test_a_batch_without_dead_groups_takes_no_round():
    assert not Resampling([], max_rounds=3).wants_more


@pytest.mark.parametrize(
    ("missing", "generations", "processes", "expected"),
    [(3, 8, 1, 3), (3, 8, 8, 3), (3, 8, 4, 3), (1, 4, 8, 2), (3, 4, 8, 4), (1, 8, 3, 3), (4, 8, 3, 6), (5, 6, 4, 6)],
)
def test_prompts_of_a_round_can_be_dealt_equally(missing, generations, processes, expected):
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


def test_each_pass_over_the_data_is_another_permutation():
    stream = PromptStream(list(range(10)), seed=4)
    passes = [stream.draw(10) for _ in range(3)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0] != PromptStream(list(range(10)), seed=5).draw(10)


class Stream:
    """Rows that can only be read from the start."""

    def __iter__(self):
        return iter(range(7))


@pytest.mark.parametrize("dataset", [list(range(7)), Stream()], ids=["with a length", "stream"])
@pytest.mark.parametrize("before", [0, 3, 7, 8, 20])
def test_a_stream_continues_after_an_interruption(dataset, before):
    whole, stream = PromptStream(dataset, seed=1), PromptStream(dataset, seed=1)
    for each in (whole, stream):
        each.draw(before)
    again = PromptStream(dataset, seed=1)
    again.load_state_dict(stream.state_dict())
    assert [again.draw(2), again.draw(9)] == [whole.draw(2), whole.draw(9)]
    assert again.state_dict() == whole.state_dict() == {"drawn": before + 11}


def test_a_stream_without_length_is_read_in_order_again_and_again():
    assert PromptStream(Stream()).draw(9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize("dataset", [[], iter(())], ids=["with a length", "stream"])
def test_no_rows(dataset):
    with pytest.raises(DataError, match="The data set has no rows to draw further prompts from"):
        PromptStream(dataset).draw(1)
