"""Groups whose completions call tools: replayed, and drawn for zero-variance groups."""

import pytest
import torch
from support.tool_runs import deal_turns
from support.trainers import begin, emitted

from vgr_trl.pixels import split_images
from vgr_trl.rows import OLD_LOGPS, valid_tokens


def half_reward(completions, trainer_state, **kwargs):
    """Completions differ in the first step, and are all alike from the second on."""
    step = trainer_state.global_step
    return [0.5 if step else float(len(completion) > 2) for completion in completions]


@pytest.mark.parametrize("changed", [{}, {"num_iterations": 2}], ids=["on-policy", "twice"])
def test_replayed_groups_have_their_turns_and_images(make, changed):
    """Completions of three turns take the place of those of one: their old log-probabilities are what a pass gives."""
    trainer = make(half_reward, replay_buffer_size=4, learning_rate=0.0, max_steps=2, **changed)
    first = begin(trainer)
    stored = trainer._generate_and_score_completions(first)
    trainer.state.global_step = 1
    trainer.model.generate = deal_turns(trainer, (0, 0, 0, 0))
    batch = trainer._generate_and_score_completions(first)
    assert trainer.newest_metrics()["replay/replaced_fraction"] == 1
    assert {tuple(ids) for ids in batch["tool_mask"].tolist()} == {tuple(ids) for ids in stored["tool_mask"].tolist()}
    counts = [len(images["image_grid_thw"]) for images in split_images(batch, 8)[0]]
    assert sorted(counts) == sorted([1, 2, 3, 2] * 2)
    assert counts == batch["num_images"]
    with torch.no_grad():
        logits = emitted(trainer.model, batch) / trainer.temperature
    expected = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    mask = valid_tokens(batch).bool()
    assert torch.allclose(batch[OLD_LOGPS][mask], expected[mask], atol=1e-5)
    assert int(batch["num_items_in_batch"]) == int(mask.sum())


def test_further_prompts_have_turns_of_their_own(make):
    """Groups in which nothing differs make room for others, whose completions call tools."""

    def reward(completions, id, **kwargs):
        return [float(len(completion) > 2) * (name in late) for completion, name in zip(completions, id, strict=True)]

    trainer = make(reward, dynamic_sampling="resample", online_filtering=True, filter_key="overall",
                   filter_low=0.01, filter_high=0.99)  # fmt: skip
    first = begin(trainer)
    late = {row["id"] for row in trainer.train_dataset} - {row["id"] for row in first}
    batch = trainer._generate_and_score_completions(first)
    assert trainer.newest_metrics()["dynamic_sampling/rounds"] == 1
    assert batch["num_images"] == [1, 2, 3, 2] * 2
    assert (batch["advantages"] != 0).all()
    trainer.train()
