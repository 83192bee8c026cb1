from collections import Counter
from dataclasses import replace

import pytest
import torch
from batches import cut, draw_batch

from vgr_trl.advantages import priority
from vgr_trl.sampling.replay import Group, ReplayBuffer, deal_groups


def group(*rewards: float, step: int = 0, scale: float = 1.0) -> Group:
    values = torch.tensor(rewards, dtype=torch.float32)
    return Group(advantages=(values - values.mean()) * scale, rewards=values, step=step)


def drawn(buffer: ReplayBuffer, count: int) -> list[list[float]]:
    return [found.rewards.tolist() for found in buffer.sample(count)]


def test_priority_is_the_sum_of_advantages_times_the_deviation_of_rewards():
    """Rewards 0 1 2: deviation 1; advantages -1.5 0 1.5 sum to 3. Without the NaN: 0 and 2, deviation sqrt(2)."""
    advantages = torch.tensor([[-1.5, 0, 1.5], [-1.0, 0, 1]])
    rewards = torch.tensor([[0.0, 1, 2], [0.0, float("nan"), 2]])
    assert priority(advantages, rewards).tolist() == pytest.approx([3, 2 * 2**0.5])


def test_the_lowest_priority_leaves_first():
    """Two completions d apart, advantages +-d/2: priority d * d / sqrt(2)."""
    buffer = ReplayBuffer(2)
    assert [buffer.add(group(0, d)) for d in (3, 1, 2, 0.5)] == [True, True, True, False]
    assert sorted(drawn(buffer, 9)) == [[0, 2], [0, 3]]


@pytest.mark.parametrize(
    ("rewards", "admitted"),
    [((1, 2), True), ((1, 1.9), False), ((1.5, 1.5), False), ((float("nan"), 3), False), ((-9, 12), True)],
)
def test_minimum_mean_reward_and_dead_groups(rewards, admitted):
    buffer = ReplayBuffer(2, min_reward=1.5)
    assert buffer.add(group(*rewards)) is admitted
    assert len(buffer) == admitted


def test_for_other_estimators_the_advantages_decide():
    """ReMax: equal rewards above the greedy completion's are alive; their priority is 0."""
    equal = Group(advantages=torch.tensor([2.0, 2.0]), rewards=torch.tensor([3.0, 3.0]))
    assert not ReplayBuffer(2).add(equal)
    buffer = ReplayBuffer(2, estimator="remax")
    assert buffer.add(equal)
    assert not buffer.add(Group(advantages=torch.tensor([0.0, 0.0]), rewards=torch.tensor([0.0, 3.0])))
    assert not buffer.add(Group(advantages=torch.tensor([9.0, 9.0]), rewards=torch.tensor([float("inf"), 3.0])))


def test_frequencies_are_proportional_to_priorities():
    """Priorities 1 : 4 : 9 of 14; the second draw, without replacement, is proportional among the two others."""
    buffer = ReplayBuffer(3, seed=5)
    for d in (1, 2, 3):
        buffer.add(group(0, d))
    counts = Counter(tuple(pair[1] for pair in drawn(buffer, 2)) for _ in range(4000))
    weights = {1: 1, 2: 4, 3: 9}
    for (one, two), count in counts.items():  # whose standard deviation is at most 0.8 %
        assert count / 4000 == pytest.approx(weights[one] / 14 * weights[two] / (14 - weights[one]), abs=0.03)
    assert len(counts) == 6


def filled() -> ReplayBuffer:
    buffer = ReplayBuffer(4, seed=3)
    for step in range(2):
        rewards = torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4]) + step
        batch = draw_batch(step, [1, 2, 1, 1], family="qwen")
        for cut_group in cut(batch, range(4), rewards=rewards, advantages=rewards - 1):
            buffer.add(replace(cut_group, step=step))
    return buffer


def content(found: Group) -> dict:
    rows, images = found.rows, found.rows.images
    return {
        "rewards": found.rewards.tolist(), "step": found.step, "ids": rows.completion_ids.tolist(),
        "pixels": [row["pixel_values"].tolist() for row in images.rows], "num_images": images.num_images,
    }  # fmt: skip


def nbytes(buffer: ReplayBuffer) -> int:
    return sum(found.rows.nbytes for found in buffer.groups if found.rows is not None)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 4)])
def test_any_number_of_processes_continues_from_files_that_hold_only_weights(before, after, tmp_path):
    alone, states = filled(), []
    alone.advance(5)
    alone.sample(2)
    for process in range(before):
        saved = deal_groups([alone.state_dict()], process, before)
        torch.save(saved, tmp_path / "buffer.pt")
        assert (tmp_path / "buffer.pt").stat().st_size < 2 * nbytes(alone) / before + 40_000
        states.append(torch.load(tmp_path / "buffer.pt", weights_only=True))
    buffers = [ReplayBuffer(4, seed=77) for _ in range(after)]
    for process, buffer in enumerate(buffers):
        buffer.load_state_dict(deal_groups(states, process, after) if (before, after) != (1, 1) else states[0])
        assert (len(buffer), buffer.step) == (4, 5)
    assert sum(map(nbytes, buffers)) == nbytes(alone)
    assert all(map(nbytes, buffers)), "each holds some"
    images = buffers[0].groups[0].rows.images.rows
    assert len({id(of_row["pixel_values"]) for of_row in images}) == 1, "images are still there once"
    for _ in range(3):
        found = [buffer.sample(3) for buffer in buffers]
        for index, of_alone in enumerate(alone.sample(3)):
            (holder,) = {same[index].holder for same in found}
            with_rows = [process for process in range(after) if found[process][index].rows is not None]
            assert with_rows == [holder]
            assert content(found[holder][index]) == content(of_alone)
    for buffer in (alone, *buffers):
        buffer.add(group(0, 100, step=5))
    expected = drawn(alone, 4)
    assert [drawn(buffer, 4) for buffer in buffers] == [expected] * after
