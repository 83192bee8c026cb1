import itertools

import pytest
import torch

from vgr_trl.sampling import PromptStream, Resampling, prompts_of_round, rows_of_process
from vgr_trl.utils import DataError


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


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_the_order_is_not_that_of_the_epochs(seed):
    """TRL shuffles with a generator of that seed, one permutation per epoch."""
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(50, generator=generator).tolist() for _ in range(3)]
    stream = PromptStream(list(range(50)), seed=seed)
    for _ in range(3):
        drawn = stream.draw(50)
        for epoch in epochs:
            assert sum(one == other for one, other in zip(drawn, epoch, strict=True)) < 10


def in_turn(epoch):
    """Even epochs draw 0 to 15, odd ones 15 to 0."""
    return list(range(16)) if epoch % 2 == 0 else list(range(15, -1, -1))


@pytest.mark.parametrize(
    ("rollout", "best", "next_best"),
    [
        (0, range(6, 16), []),  # rows 0 and 1 are at hand, 2 to 5 come in the next quarter
        (3, range(12, 16), [0, 1]),  # 0 to 5 are drawn, 2 to 5 of them in this quarter; 6, 7 at hand, 8 to 11 come
        (7, [], range(10)),  # 10 to 13 are drawn in this quarter, 14 and 15 at hand, 15 to 12 come in the next epoch
        (8, range(10), []),  # of epoch 1: 15, 14 at hand, 13 to 10 come; 12 to 15 ended epoch 0
    ],
)
def test_what_the_epoch_has_drawn_or_draws_soon_is_left_out(rollout, best, next_best):
    """Two rows per rollout, eight rollouts per epoch, so a quarter are two rollouts."""
    seen = set()
    stream = PromptStream(list(range(16)), seed=1, batch=2, order=in_turn)
    everything = stream.draw(16, rollout, usable=lambda row: row not in seen and not seen.add(row))
    assert set(everything[: len(best)]) == set(best)
    assert set(everything[len(best) :][: len(next_best)]) == set(next_best)
    assert len(set(everything)) == 16, "rather a prompt once more than none"


def test_no_more_than_there_are():
    seen = set()
    stream = PromptStream(list(range(5)), batch=2, order=lambda epoch: [0, 1, 2, 3])
    assert len(stream.draw(9, 0, usable=lambda row: row not in seen and not seen.add(row))) == 5
    assert stream.draw(1, 0, usable=lambda row: row not in seen) == []


class Stream:
    """Rows that can only be read from the start."""

    def __init__(self, length=7):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("dataset", [list(range(7)), Stream(), Stream(200)], ids=["with a length", "short", "long"])
@pytest.mark.parametrize("before", [1, 3, 7, 8, 20])
def test_a_stream_continues_after_an_interruption(dataset, before):
    whole, stream = PromptStream(dataset, seed=1), PromptStream(dataset, seed=1)
    for each in (whole, stream):
        each.draw(before)
    again = PromptStream(dataset, seed=1)
    again.load_state_dict(stream.state_dict())
    assert [again.draw(2, 1), again.draw(9, 2)] == [whole.draw(2, 1), whole.draw(9, 2)]
    assert again.state_dict() == whole.state_dict()


def test_a_long_stream_is_read_ahead_of_the_epoch():
    """32 rollouts of 3 rows ahead; the epoch has got to row 30 after 10 rollouts, then to row 300."""
    stream = PromptStream(Stream(1000), batch=3)
    assert stream.draw(2) == [96, 97]
    assert stream.draw(2, 1) == [99, 100]
    assert stream.draw(2, 10) == [126, 127]
    assert stream.draw(80, 11) == list(range(129, 209))
    assert stream.draw(2, 11) == [209, 210], "what comes within 32 rollouts only is left out"


@pytest.mark.parametrize("rollout", range(0, 20))
def test_of_a_short_stream_those_furthest_from_the_epoch_are_read(rollout):
    """16 rows, 2 per rollout: from the 8th after the one at hand to the 5th before it."""
    stream = PromptStream(Stream(16), batch=2)
    place = rollout % 8 * 2
    assert {*stream.draw(4, rollout)} == {(place + distance) % 16 for distance in range(8, 12)}


@pytest.mark.parametrize("dataset", [[], iter(())], ids=["with a length", "stream"])
def test_no_rows(dataset):
    with pytest.raises(DataError, match="The data set has no rows to draw further prompts from"):
        PromptStream(dataset).draw(1)
