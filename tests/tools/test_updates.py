from functools import partial

import pytest
import torch
from datasets import Dataset
from support.tool_runs import DAPO, STOCK, call, deal_turns, tool_processor
from support.trainers import BIG_STEPS, begin, config, emitted, letters_reward, tiny_model, weights
from transformers import Qwen3Config, Qwen3ForCausalLM

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.trl_bridge import OLD_LOGPS, from_trl


def test_prompts_are_computed_once_where_completions_hold_images(make, model_folder):
    measures = {"token_weights": True, "enable_perception_filtering": True, "signals": ["similarity"]}
    measures |= {"skip_zero_advantage": "off", "skip_zero_advantage_tokens": "off"}
    for sizes in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}):
        after, logged = [], []
        for sharing in ("off", "on"):
            torch.manual_seed(0)
            model = tiny_model(model_folder).double()
            options = BIG_STEPS | {"max_completion_length": 400} | sizes
            trainer = make(model=model, share_prompts=sharing, temperature=1.0, **options, **measures)
            trainer.train()
            after.append(weights(trainer))
            logged.append(trainer.state.log_history[0])
        assert (after[0] - after[1]).abs().max() < 1e-6
        # 16 turns are dealt, not generated; 8 rows are scored, scored again and trained on.
        assert logged[1]["sharing/prompts_per_row"] == pytest.approx((16 + 3 * 2) / (16 + 3 * 8))
        for name in ("attention/late/vgr", "signals/similarity", "perception_token_fraction", "entropy"):
            assert logged[1][name] == pytest.approx(logged[0][name], rel=1e-5)


@pytest.mark.parametrize("changed", [{}, {"num_iterations": 2, "mask_truncated_completions": True}], ids=str)
def test_updates_are_those_of_trl(make, model_folder, changed):
    options = BIG_STEPS | {"max_completion_length": 400, "per_device_train_batch_size": 4,
                           "gradient_accumulation_steps": 2, **changed}  # fmt: skip
    after = []
    for kind in (STOCK, None):
        kinds = {"kind": kind, **DAPO} if kind else {"compute_attention_metrics": False}
        torch.manual_seed(0)
        trainer = make(model=tiny_model(model_folder).double(), **options, **kinds)
        trainer.train()
        after.append(weights(trainer))
    before = torch.cat([each.detach().flatten() for each in tiny_model(model_folder).double().parameters()])
    assert (after[0] - before).abs().max() > 1e-4
    assert (after[0] - after[1]).abs().max() < 1e-9


def double(number: int) -> int:
    """Return twice a number.

    Args:
        number: to double.
    """
    return 2 * number


def test_updates_of_a_text_model_are_those_of_trl(model_folder, tmp_path):
    tokenizer, after = tool_processor(model_folder).tokenizer, []
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": word}]} for word in ("red", "blue")])
    for trainer, options in (STOCK, (DAPOTrainer, DAPOConfig)):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, **vocabulary)).double()
        args = config(tmp_path / "run", options, **DAPO, **BIG_STEPS | {"max_completion_length": 400})
        made = trainer(model, letters_reward, args, rows, processing_class=tokenizer, tools=[double])
        start = weights(made)
        made.model.generate = deal_turns(made, asked=lambda place, turn: call("double", number=turn))
        made.train()
        after.append(weights(made))
    assert (after[0] - start).abs().max() > 1e-4
    assert (after[0] - after[1]).abs().max() < 1e-7


def test_a_completion_that_ends_behind_an_image(make):
    """An image is not cut off where nothing behind it has a loss: updates are those of passes over all columns."""
    rule = "support.tool_runs.first_tokens"
    after = []
    for skips in ("auto", "off"):
        torch.manual_seed(0)
        trainer = make(credit_rules=[rule], skip_padding=skips, compute_attention_metrics=False, **BIG_STEPS | {
            "max_completion_length": 400})  # fmt: skip
        trainer.train()
        after.append(weights(trainer))
    assert (after[0] - after[1]).abs().max() < 1e-5


def test_a_micro_batch_without_loss_runs_the_images_of_a_tool_whole(make):
    trainer = make(lambda completions, **columns: [1.0] * len(completions), skip_padding="off",
                   deal=partial(deal_turns, turns=(1, 1, 1, 1)), compute_attention_metrics=False)  # fmt: skip
    before = weights(trainer)
    trainer.train()
    assert trainer.run.features.skip_zero_advantage.enabled
    assert torch.equal(weights(trainer), before)


def half_reward(completions, trainer_state, **kwargs):
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
    counts = [len(images["image_grid_thw"]) for images in from_trl(batch).images.rows]
    assert sorted(counts) == sorted([1, 2, 3, 2] * 2)
    assert counts == batch["num_images"]
    with torch.no_grad():
        logits = emitted(trainer.model, batch) / trainer.temperature
    expected = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    mask = from_trl(batch).valid
    assert torch.allclose(batch[OLD_LOGPS][mask], expected[mask], atol=1e-5)
    assert int(batch["num_items_in_batch"]) == int(mask.sum())


def test_further_prompts_have_turns_of_their_own(make):
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
