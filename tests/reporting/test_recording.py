import json
import math
import re
from dataclasses import asdict
from functools import partial

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.dealt_completions import generate_by_prompt
from support.launching import results_of
from support.trainers import config, letters_reward, logged, prompts, train_file, vision_trainer

from vgr_trl import registries
from vgr_trl.callbacks.trackers import progress_lines
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.registries import declares
from vgr_trl.reporting.recorder import RecordBeforeTraining, split_tokens, summarise_rollout
from vgr_trl.reporting.records import read_logs, read_run
from vgr_trl.rewards import accuracy_reward, vgr_reward

SECONDS = ("perf/", "step_time", "timing/", "train_")
OPTIONS = {"max_steps": 3, "per_device_eval_batch_size": 4, "rollout_log_steps": 1}
TOKENIZER = build_processor(["what colour is the circle?", "red blue", "a red"]).tokenizer


@pytest.fixture
def make(vision_trainer):
    return partial(vision_trainer, eval_rows=vision_trainer.rows.select(range(2)), **OPTIONS)


def test_records_hold_what_was_generated_measured_and_rewarded(make, tmp_path):
    trainer = make([accuracy_reward, vgr_reward, letters_reward], token_weights=True, enable_perception_filtering=True,
                   log_completions=True, num_completions_to_print=0, reward_weights=[1.0, 0.5, 2.0],
                   hub_token="hf_secret")  # fmt: skip
    seen = []
    original = trainer._generate_and_score_completions

    def watched(inputs):
        batch = original(inputs)
        seen.append((inputs, batch))
        return batch

    trainer._generate_and_score_completions = watched
    trainer.train()
    run = read_run(tmp_path / "run")
    assert run.steps() == [(0, "train"), (1, "train"), (2, "train")]
    assert run.rewards == ["accuracy_reward", "vgr_reward", "letters_reward"]
    assert "rollout_log_steps" in run.description["changed"]
    assert "hf_secret" not in json.dumps(run.description)
    tokenizer = trainer._tokenizer
    for record, (inputs, batch) in zip(run.records(), seen, strict=True):
        assert [completion.group for completion in record.completions] == [0, 0, 1, 1]
        for row, completion in zip((0, 1, 4, 5), record.completions, strict=True):
            length = int(batch["completion_mask"][row].sum())
            ids = batch["completion_ids"][row][:length]
            assert "".join(completion.tokens) == tokenizer.decode(ids)
            assert len(completion.tokens) == length
            assert completion.text == tokenizer.decode(ids, skip_special_tokens=True)
            assert completion.advantages == pytest.approx(batch["advantages"][row][:length].tolist(), rel=1e-4)
            assert completion.solution == inputs[row]["solution"]
            assert completion.prompt.count("<image>") == 1
            assert "image_pad" not in completion.prompt
            rewards = completion.rewards
            assert completion.correct == (rewards["accuracy_reward"] == 1)
            weighted = rewards["accuracy_reward"] + 0.5 * rewards["vgr_reward"] + 2 * rewards["letters_reward"]
            assert completion.reward == pytest.approx(weighted, rel=1e-4)
            # What the loss reads is the product of the advantage, the weight and whether the filter keeps the token.
            for credit, weight in zip(completion.advantages, completion.weights, strict=True):
                assert credit == 0 or credit == pytest.approx(completion.advantage * weight, rel=1e-3)
            assert sum(completion.weights) / length == pytest.approx(1, abs=1e-3)
            assert all(value <= 0 for value in completion.logps)
            for change, dependency in zip(completion.changes, completion.dependency, strict=True):
                # The dependency is e^d - d - 1 of the change d.
                assert dependency == pytest.approx(math.exp(change) - change - 1, rel=1e-3, abs=1e-4)
            (image,) = completion.images
            assert image.perturbed not in (None, image.file)
            assert (run.folder / image.perturbed).is_file()


def test_own_signals_and_credit_rules_are_recorded_token_by_token(make, tmp_path, monkeypatch):
    """A signal that counts the tokens, made after the rewards; a rule of its odd ones, and one that drops the first."""

    @declares(needs=("dependency",))
    def place(signals, options):
        return torch.arange(signals.mask.size(1)).expand(signals.mask.shape).float()

    @declares(needs=("place",))
    def odd(advantages, signals, mask, options):
        return 1 + signals.extra["place"] % 2, {}

    def later(advantages, signals, mask, options):
        return torch.arange(mask.size(1)).expand(mask.shape) > 0, {}

    monkeypatch.setitem(registries.signals._own, "place", place)
    monkeypatch.setitem(registries.credit_rules._own, "odd", odd)
    monkeypatch.setitem(registries.credit_rules._own, "later", later)
    make(max_steps=1, credit_rules=["odd", "later"]).train()
    for completion in next(read_run(tmp_path / "run").records()).completions:
        places = list(range(len(completion.tokens)))
        assert completion.signals == {"place": places}
        assert completion.credit == {"odd": [1 + p % 2 for p in places], "later": [int(p > 0) for p in places]}


def test_attention_maps_sum_to_the_mass_on_the_image_on_its_grid(make, vision_trainer, tmp_path):
    rows = vision_trainer.rows.map(lambda row: {"image": row["image"].resize((84, 56))})
    make(rows=rows, max_steps=1).train()
    record = next(read_run(tmp_path / "run").records())
    for completion in record.completions:
        (image,) = completion.images
        # 84 x 56 pixels in patches of 14, two by two of them a vision token: 2 rows of 3.
        assert (image.width, image.height, image.grid) == (84, 56, [2, 3])
        masses = [sum(completion.attention.row(token)) for token in range(len(completion.tokens))]
        mean = sum(masses) / len(masses)
        assert mean == pytest.approx(completion.metrics["late"]["attention_vision"], rel=5e-3)
        with Image.open(tmp_path / "run" / "rollouts" / image.file) as thumbnail:
            assert thumbnail.size == (84, 56)


def test_evaluations_ask_the_same_questions_as_before_the_first_step(make, tmp_path, eight_gpus):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = make(**evaluated)
    trainer.add_callback(RecordBeforeTraining(trainer))
    trainer.train()
    assert eight_gpus == [], "a run on a CPU"
    run = read_run(tmp_path / "run")
    evaluations = list(run.records("eval"))
    assert [record.step for record in evaluations] == [0, 1, 2]
    asked = [[completion.question for completion in record.completions] for record in evaluations]
    assert asked[0] == asked[1] == asked[2]
    assert len(asked[0]) == 4
    assert all(completion.advantages is None and completion.tokens for completion in evaluations[0].completions)
    logs = list(read_logs(run.folder / "logs.jsonl"))
    assert [entry.step for entry in logs if "loss" in entry.values] == [1, 2]
    assert [entry.step for entry in logs if "eval_reward" in entry.values] == [1, 2]
    # The training itself is the one without such a record, and the first evaluation is not mixed with it.
    other = make(**evaluated, output_dir=str(tmp_path / "other"))
    other.train()
    assert read_run(tmp_path / "other").steps("eval") == [(1, "eval"), (2, "eval")]
    for name in ("loss", "reward", "eval_reward", "eval_completions/mean_length"):
        assert logged(trainer, name) == logged(other, name) != []


def test_a_damaged_image_of_the_evaluation_is_replaced_before_training_as_later(make, vision_trainer, tmp_path):
    rows = vision_trainer.rows.select(range(4))
    stored = rows.with_format(None).to_list()
    for row in stored[:3]:
        row["image"]["bytes"] = row["image"]["bytes"][:100]
    damaged, show = Dataset.from_list(stored, features=rows.features), rows.format["format_kwargs"]["transform"]
    trainer = make(eval_rows=damaged.with_transform(show), eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer.add_callback(RecordBeforeTraining(trainer))
    trainer.train()
    asked = [[each.question for each in record.completions] for record in read_run(tmp_path / "run").records("eval")]
    assert asked[0] == asked[1]


def test_the_last_lines_compare_under_the_late_weights_and_begin_before_training(make, tmp_path):
    weights = {"early_reward_weights": [5.0, 1.0], "reward_weights": [0.5, 1.0], "warmup_steps": 1}
    trainer = make([one_reward, letters_reward], **weights, max_steps=2, eval_strategy="steps", eval_steps=2)
    before = RecordBeforeTraining(trainer)
    trainer.add_callback(before)
    trainer.train()
    letters = logged(trainer, "rewards/letters_reward/mean")
    assert logged(trainer, "reward_late_weights") == pytest.approx([0.5 + mean for mean in letters])
    assert logged(trainer, "reward")[0] == pytest.approx(5 + letters[0])
    recorded = [completion.reward for completion in next(read_run(tmp_path / "run").records("eval")).completions]
    training, evaluation = progress_lines(trainer.state.log_history, "2 rows", before.scores, before.completions)
    assert f"{0.5 + letters[0]:.3f} → {0.5 + letters[1]:.3f}" in training
    assert f"on the first 4 completions: reward {sum(recorded) / 4:.3f}" in evaluation


def one_reward(completions, **kwargs):
    return [1.0] * len(completions)


def test_recording_makes_no_pass_and_changes_no_number(make, passes, tmp_path):
    histories = []
    for every in (0, 1):
        passes.clear()
        torch.manual_seed(0)
        trainer = make(rollout_log_steps=every, max_steps=2, token_weights=True)
        trainer.train()
        log = trainer.state.log_history
        histories.append([[item for item in entry.items() if not item[0].startswith(SECONDS)] for entry in log])
        assert [with_gradients for with_gradients, _ in passes] == [False, True] * 2
        assert [(tmp_path / "run" / name).exists() for name in ("rollouts", "training_logs")] == [every == 1] * 2
    assert str(histories[0]) == str(histories[1])


def test_a_group_that_another_replaced_is_marked(make, tmp_path):
    def reward(completions, trainer_state, **kwargs):
        """At the second step the first prompt's completions are rewarded alike."""
        first = trainer_state.global_step == 0
        return [float(row % 2) if first or row >= 4 else 0.0 for row in range(len(completions))]

    make(reward, replay_buffer_size=4, max_steps=2).train()
    first, second = read_run(tmp_path / "run").records()
    assert not any(completion.replaced for completion in first.completions)
    assert [completion.replaced for completion in second.completions] == [True, True, False, False]
    assert [completion.advantages is None for completion in second.completions] == [True, True, False, False]


def test_a_continued_run_records_and_measures_by_the_schedule_of_an_uninterrupted_one(make, tmp_path):
    build = partial(make, max_steps=3, rollout_log_steps=2, attention_rows="auto", save_strategy="steps", save_steps=1)
    histories = []
    for checkpoint in (None, str(tmp_path / "run" / "checkpoint-1")):
        trainer = build()
        trainer.train(resume_from_checkpoint=checkpoint)
        assert read_run(tmp_path / "run").steps() == [(0, "train"), (2, "train")]
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        histories.append([[item for item in sorted(entry.items()) if not item[0].startswith(SECONDS)] for entry in log])
    assert str(histories[0]) == str(histories[1])
    assert not (tmp_path / "run" / "rollouts.1").exists(), "it appends"
    build(max_steps=1).train()
    assert read_run(tmp_path / "run").steps() == [(0, "train")], "a new run moves the records aside"
    assert (tmp_path / "run" / "rollouts.1").is_dir()


def test_training_continues_where_records_cannot_be_written(make, tmp_path, monkeypatch):
    warnings = []
    trainer = make(max_steps=2)
    monkeypatch.setattr("vgr_trl.reporting.recorder.logger.warning_once", warnings.append)

    def always_full(writer):
        (writer.folder / "records-000001.jsonl").symlink_to("/dev/full")
        return writer.folder / "records-000001.jsonl"

    monkeypatch.setattr("vgr_trl.reporting.records.RecordWriter._new_file", always_full)
    trainer.train()
    assert trainer.state.global_step == 2
    (warning,) = set(warnings)
    assert "Disk full while writing" in warning
    assert "## Training, step 1" in next((tmp_path / "run" / "training_logs").glob("rollout*")).read_text()
    assert len((tmp_path / "run" / "rollouts" / "logs.jsonl").read_text().splitlines()) == 3


def run(model_folder, question_file, output, rows_per_process):
    rows = prompts(question_file)
    options = config(
        output, max_steps=2, learning_rate=0.0, per_device_train_batch_size=rows_per_process,
        per_device_eval_batch_size=rows_per_process, max_completion_length=64, token_weights=True,
        enable_perception_filtering=True, rollout_log_steps=1, rollout_log_samples=6, eval_strategy="steps",
        eval_steps=9, rollout_log_path=str(output / "rollouts.md"),
    )  # fmt: skip
    rewards = [accuracy_reward, vgr_reward, letters_reward]
    trainer = vision_trainer(model_folder, rewards, options, rows, rows.select(range(4)))
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.add_callback(RecordBeforeTraining(trainer))
    trainer.train()
    trainer.evaluate()


def flat(value):
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in flat(item)] if isinstance(value, (dict, list, tuple)) else [value]


@pytest.mark.minutes
def test_one_process_and_two_record_the_same(model_folder, question_files, tmp_path):
    question_file = train_file(question_files)
    results_of(run, model_folder, question_file, tmp_path / "two", 4, processes=2)
    run(model_folder, question_file, tmp_path / "one", rows_per_process=8)
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    assert one.steps() == two.steps() == [(0, "eval"), (0, "train"), (1, "train"), (2, "eval")]
    for first, second in zip(one.records(), two.records(), strict=True):
        # Of two prompts with four completions each: the first two of each, then the third and fourth of the first.
        assert [completion.group for completion in first.completions] == [0, 0, 0, 0, 1, 1]
        for mine, theirs in zip(map(asdict, first.completions), map(asdict, second.completions), strict=True):
            values, others = (list(each["attention"].pop("values")) for each in (mine, theirs))
            assert others == pytest.approx(values, abs=1)
            for found, expected in zip(flat(theirs), flat(mine), strict=True):
                assert found == expected or found == pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert (two.folder / mine["images"][0]["file"]).is_file()
    text, other = ((tmp_path / name / "rollouts.md").read_text(encoding="utf-8") for name in ("one", "two"))
    assert re.findall("^#.*", text, re.M) == re.findall("^#.*", other, re.M)
    assert "8 completions" in other


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_pieces_of_any_tokens_are_the_text_also_where_bytes_are_none(ids):
    pieces = split_tokens(ids, decode)
    assert (len(pieces), "".join(pieces)) == (len(ids), decode(ids))
    of_bytes = TOKENIZER("é").input_ids  # two bytes, which no token joins
    assert split_tokens([*of_bytes, *TOKENIZER(" red").input_ids], decode) == ["", "é", " red"]


def test_a_batch_in_numbers():
    # Accuracy 1, 0, 1 and one row that it does not apply to; totals 1·a + 2·b are 1, 1, 3 and 2.
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 1.0], [math.nan, 1.0]])
    metrics = {"attention/late/vgr": 2.0, "attention/prompt/late/vgr": 9.0, "token_weight_mean": 1.0, "kl": 3.0,
               "combined_token_fraction": 0.5}  # fmt: skip
    summary = summarise_rollout(rewards, ["accuracy_reward", "other"], torch.tensor([1.0, 2.0]), metrics)
    assert summary.completions == 4
    assert summary.success_rate == pytest.approx(2 / 3)
    assert summary.rewards["accuracy_reward"] == pytest.approx((2 / 3, math.sqrt(1 / 3)))
    assert summary.rewards["other"] == pytest.approx((0.625, math.sqrt((0.625**2 + 0.125**2 + 2 * 0.375**2) / 3)))
    assert summary.rewards["total"] == pytest.approx((1.75, math.sqrt((2 * 0.75**2 + 1.25**2 + 0.25**2) / 3)))
    assert summary.segments == {"late": {"vgr": 2.0}}
    assert summary.credit == {"token_weight_mean": 1.0, "combined_token_fraction": 0.5}
    nothing = summarise_rollout(torch.full((1, 1), math.nan), ["accuracy_reward"], torch.tensor([1.0]), {})
    assert all(map(math.isnan, (nothing.success_rate, *nothing.rewards["accuracy_reward"])))
    assert summarise_rollout(rewards[:, 1:], ["other"], torch.tensor([1.0]), {}).success_rate is None
