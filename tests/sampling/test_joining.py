"""Rows of two batches joined by hand: widths, paddings, columns that only one of them has; and what they weigh."""

import torch

from vgr_trl.batch import Rows, join_rows
from vgr_trl.sampling import Group, ReplayBuffer

PAD = 9


def rows(prompt, completion, count=1, **columns):
    """Tokens counted up from 1, all of them valid."""
    wide = {
        "prompt_ids": torch.arange(1, prompt + 1).expand(count, -1),
        "prompt_mask": torch.ones(count, prompt, dtype=torch.long),
        "completion_ids": torch.arange(1, completion + 1).expand(count, -1),
        "completion_mask": torch.ones(count, completion, dtype=torch.long),
    }
    return Rows(prompt, completion, {**wide, **columns}, [{} for _ in range(count)])


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    joined = join_rows([rows(2, 3), rows(3, 1)], pad_token_id=PAD).columns
    assert joined["prompt_ids"].tolist() == [[PAD, 1, 2], [1, 2, 3]]
    assert joined["prompt_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert joined["completion_ids"].tolist() == [[1, 2, 3], [1, PAD, PAD]]
    assert joined["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_lengths_are_multiples():
    joined = join_rows([rows(2, 3), rows(4, 1)], pad_token_id=PAD, pad_to_multiple_of=4)
    assert (joined.prompt_length, joined.completion_length) == (4, 4)
    assert joined.columns["prompt_ids"].tolist() == [[PAD, PAD, 1, 2], [1, 2, 3, 4]]


def test_columns_that_only_one_has():
    """No tool: every token is the policy's. No old log-probabilities: NaN, taken from the first pass. No type: 0."""
    one = rows(
        2,
        2,
        tool_mask=torch.tensor([[1, 0]]),
        old_per_token_logps=torch.tensor([[-0.5, -0.25]]),
        token_type_ids=torch.tensor([[0, 1, 0, 0]]),
        importance_sampling_ratio=torch.tensor([[0.5]]),
    )
    other = rows(1, 3, importance_sampling_ratio=torch.tensor([[2.0, 3.0, 4.0]]))
    joined = join_rows([one, other], pad_token_id=PAD).columns
    assert joined["tool_mask"].tolist() == [[1, 0, 1], [1, 1, 1]]
    assert joined["token_type_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert joined["importance_sampling_ratio"].tolist() == [[0.5, 0.5, 1.0], [2.0, 3.0, 4.0]]
    logps = joined["old_per_token_logps"]
    assert logps[0].tolist() == [-0.5, -0.25, 0.0]
    assert logps[1].isnan().all()


def test_megabytes():
    """Two rows of 2 + 3 tokens, ids and masks: 2 x 5 x 2 numbers of 8 bytes."""
    stored = rows(2, 3, count=2)
    values = torch.tensor([0.0, 1.0])
    buffer = ReplayBuffer(2)
    assert buffer.megabytes == 0
    assert buffer.add(Group(advantages=values - 0.5, rewards=values, rows=stored))
    assert buffer.megabytes == 160 / 1e6


def test_what_is_dead_if_nothing_else_is_said():
    """Rewards 0 and d have the deviation d / sqrt(2): 0.7e-6 and 1.4e-6."""
    for difference, admitted in ((1e-6, False), (2e-6, True)):
        values = torch.tensor([0.0, difference])
        assert ReplayBuffer(1).add(Group(advantages=values - values.mean(), rewards=values)) is admitted
