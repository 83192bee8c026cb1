"""What a training leaves in its folder for people to look at."""

import gc
import json
import math
import re
import subprocess
import sys
import weakref

import pytest
import torch
from PIL import Image
from support.launching import environment
from support.trainers import letters_reward, logged, train_file

from vgr_trl.reporting.recorder import RecordBefore
from vgr_trl.reporting.records import read_run
from vgr_trl.rewards import accuracy_reward, vgr_reward
from vgr_trl.utils import ConfigError


def half_dead_reward(completions, **kwargs):
    """The first prompt's completions earn the same."""
    return [0.0 if row < 4 else float(row % 2) for row in range(len(completions))]


SECONDS = ("perf/", "step_time", "timing/", "train_")
OPTIONS = {
    "max_steps": 3,
    "per_device_eval_batch_size": 4,
    "rollout_log_steps": 1,
}


@pytest.fixture
def make(vision_trainer):
    def build(rewards=letters_reward, rows=vision_trainer.rows, **changed):
        return vision_trainer(rewards, rows, vision_trainer.rows.select(range(2)), **OPTIONS | changed)

    build.rows = vision_trainer.rows
    return build


def test_records_hold_what_was_generated_measured_and_earned(make, tmp_path):
    trainer = make([accuracy_reward, vgr_reward, letters_reward], token_weights=True, enable_perception_filtering=True,
                   log_completions=True, num_completions_to_print=0, reward_weights=[1.0, 0.5, 2.0])  # fmt: skip
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
    assert run.description["options"]["rollout_log_steps"] == 1
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
            products = [completion.advantage * weight for weight in completion.weights]
            for credit, product in zip(completion.advantages, products, strict=True):
                assert credit == 0 or credit == pytest.approx(product, rel=1e-3)
            assert sum(completion.weights) / length == pytest.approx(1, abs=1e-3)
            assert all(value >= 0 for value in completion.dependency)
            assert all(value <= 0 for value in completion.logps)
            for change, dependency in zip(completion.changes, completion.dependency, strict=True):
                # The dependency is e^d - d - 1 of the change d.
                assert dependency == pytest.approx(math.exp(change) - change - 1, rel=1e-3, abs=1e-4)
            (image,) = completion.images
            assert image.perturbed is not None
            assert image.perturbed != image.file
            assert (run.folder / image.perturbed).is_file()


def test_attention_maps_sum_to_the_mass_on_the_image_on_its_grid(make, tmp_path):
    rows = make.rows.map(lambda row: {"image": row["image"].resize((84, 56))})
    make(rows=rows, max_steps=1).train()
    record = next(read_run(tmp_path / "run").records())
    for completion in record.completions:
        (image,) = completion.images
        # 84 x 56 pixels in patches of 14, two by two of them a vision token: 2 rows of 3.
        assert (image.width, image.height, image.grid) == (84, 56, (2, 3))
        masses = [sum(completion.attention.row(token)) for token in range(len(completion.tokens))]
        mean = sum(masses) / len(masses)
        assert mean == pytest.approx(completion.metrics["late"]["attention_vision"], rel=5e-3)
        with Image.open(tmp_path / "run" / "rollouts" / image.file) as thumbnail:
            assert thumbnail.size == (84, 56)


def test_one_question_is_one_question_at_every_evaluation(make, tmp_path):
    trainer = make(eval_strategy="steps", eval_steps=1, max_steps=2)
    trainer.evaluate()
    trainer.train()
    run = read_run(tmp_path / "run")
    evaluations = list(run.records("eval"))
    assert [record.step for record in evaluations] == [0, 1, 2]
    asked = [[completion.question for completion in record.completions] for record in evaluations]
    assert asked[0] == asked[1] == asked[2]
    assert len(asked[0]) == 4
    assert all(completion.advantages is None for completion in evaluations[0].completions)
    training = {completion.question for record in run.records("train") for completion in record.completions}
    assert len(training) > 1
    logged = run.logs()
    assert [entry.step for entry in logged if entry.mode == "train"] == [1, 2]
    assert all("eval_reward" in entry.values for entry in logged if entry.mode == "eval")


@pytest.mark.parametrize(("every", "expected"), [(2, [0, 2, 4]), (3, [0, 3]), (100, [0])])
def test_records_are_as_frequent_as_asked_for(make, tmp_path, every, expected):
    make(rollout_log_steps=every, max_steps=5, compute_attention_metrics=False).train()
    assert [step for step, _ in read_run(tmp_path / "run").steps()] == expected


def test_with_long_rollouts_the_first_one_after_a_step_is_recorded(make, tmp_path):
    # A rollout every two steps: at 0, 2 and 4.
    make(rollout_log_steps=3, max_steps=6, steps_per_generation=2, compute_attention_metrics=False).train()
    assert [step for step, _ in read_run(tmp_path / "run").steps()] == [0, 4]


def test_nothing_is_written_or_kept_when_switched_off(make, tmp_path):
    trainer = make(rollout_log_steps=0)
    trainer.train()
    assert not (tmp_path / "run" / "rollouts").exists()
    assert trainer.recorder.rows_due(8) is None


def test_recording_makes_no_pass_and_changes_no_number(make, passes):
    histories = []
    for every in (0, 1):
        passes.clear()
        torch.manual_seed(0)
        trainer = make(rollout_log_steps=every, max_steps=2, token_weights=True)
        trainer.train()
        histories.append([
            {name: value for name, value in entry.items() if not name.startswith(SECONDS)}
            for entry in trainer.state.log_history
        ])  # fmt: skip
        assert [with_gradients for with_gradients, _ in passes] == [False, True] * 2
    assert str(histories[0]) == str(histories[1])


def test_rows_without_images_and_without_measurement_are_recorded_too(make, tmp_path):
    rows = make.rows.map(lambda row, index: {"image": None if index % 2 else row["image"]}, with_indices=True)
    make(rows=rows, max_steps=4).train()
    completions = [completion for record in read_run(tmp_path / "run").records() for completion in record.completions]
    blind = [completion for completion in completions if not completion.images]
    assert blind
    assert len(blind) < len(completions)
    assert all(completion.attention is None for completion in blind)
    assert all(set(completion.vgr) == {None} for completion in blind)
    make(rows=rows, max_steps=1, compute_attention_metrics=False).train()
    record = next(read_run(tmp_path / "run").records())
    assert all(completion.vgr is completion.metrics is completion.logps is None for completion in record.completions)


def test_a_group_that_another_replaced_is_marked(make, tmp_path):
    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 0:
            return [float(row % 2) for row in range(len(completions))]
        return half_dead_reward(completions)

    make(reward, replay_buffer_size=4, max_steps=2).train()
    first, second = read_run(tmp_path / "run").records()
    assert not any(completion.replaced for completion in first.completions)
    assert [completion.replaced for completion in second.completions] == [True, True, False, False]
    assert second.completions[0].advantages is None
    assert second.completions[2].advantages is not None


def test_truncated_completions_that_do_not_count_keep_their_tokens(make, tmp_path):
    make(mask_truncated_completions=True, max_steps=1, compute_attention_metrics=False).train()
    record = next(read_run(tmp_path / "run").records())
    assert all(1 <= len(completion.tokens) <= 6 for completion in record.completions)


def test_a_continued_run_appends_and_a_new_one_moves_aside(make, tmp_path):
    make(max_steps=2, save_strategy="steps", save_steps=1).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    make(max_steps=3).train(resume_from_checkpoint=checkpoint)
    run = read_run(tmp_path / "run")
    assert run.steps() == [(0, "train"), (1, "train"), (2, "train")]
    assert sorted(path.name for path in run.folder.glob("records-*")) == [
        "records-000001.jsonl",
        "records-000002.jsonl",
    ]
    make(max_steps=1).train()
    assert read_run(tmp_path / "run").steps() == [(0, "train")]
    assert (tmp_path / "run" / "rollouts.1").is_dir()


def test_a_checkpoint_is_written_after_the_records_before_it(make, tmp_path):
    trainer = make(max_steps=2, save_strategy="steps", save_steps=1)
    found = []
    trainer.add_callback(Watch(lambda: found.append(read_run(tmp_path / "run").steps())))
    trainer.train()
    assert found == [[(0, "train")], [(0, "train"), (1, "train")]]


class Watch:
    """Called after the callbacks of the trainer."""

    def __init__(self, action):
        self.action = action

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.action() if name == "on_save" else None


def test_markdown_logs_are_written_at_the_log_or_at_once(make, tmp_path):
    paths = {
        "rollout_log_path": tmp_path / "logs" / "rollouts.md",
        "eval_log_path": tmp_path / "eval.md",
        "attention_diag_log_path": tmp_path / "attention.md",
        "token_weights_log_path": tmp_path / "token_weights.md",
    }
    options = {name: str(path) for name, path in paths.items()}
    trainer = make([accuracy_reward, letters_reward], token_weights=True, max_steps=2, **options)
    trainer.train()
    trainer.evaluate()
    trainer.recorder.sink.close()
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    assert re.findall("^## (.*)", texts["rollout_log_path"], re.M) == ["Training, step 0", "Training, step 1"]
    assert re.findall("^## (.*)", texts["eval_log_path"], re.M) == ["Evaluation, step 2"]
    assert len(re.findall("^## ", texts["attention_diag_log_path"], re.M)) == 3
    assert len(re.findall("^## ", texts["token_weights_log_path"], re.M)) == 2
    mean = trainer.state.log_history[0]["rewards/letters_reward/mean"]
    assert f"| letters\\_reward | {mean:.4g} |" in texts["rollout_log_path"]
    vgr = trainer.state.log_history[0]["attention/late/vgr"]
    assert f"| late | {vgr:.4g} |" in texts["rollout_log_path"]
    assert "| token\\_weight\\_mean | 1 |" in texts["token_weights_log_path"]


def test_markdown_logs_stand_below_the_run_by_default(make, tmp_path):
    trainer = make([accuracy_reward, letters_reward], token_weights=True, max_steps=3, rollout_log_steps=2)
    trainer.train()
    trainer.evaluate()
    trainer.recorder.sink.close()
    written = {path.name.rsplit("_", 2)[0]: path for path in (tmp_path / "run" / "training_logs").iterdir()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in written.items()}
    assert set(texts) == {"rollout_results", "eval_results", "attention_diagnostics"}
    rollouts = texts["rollout_results"]
    assert re.findall("^## (.*)", rollouts, re.M) == ["Training, step 0", "Training, step 2"]
    assert len(re.findall("^### Token weights$", rollouts, re.M)) == 2
    assert len(re.findall("^#### Sample", rollouts, re.M)) == 8
    assert "### Token weights" not in texts["attention_diagnostics"]


@pytest.mark.parametrize("off", [{"markdown_logs": False}, {"rollout_log_steps": 0}], ids=str)
def test_no_markdown_logs_with_one_flag(make, tmp_path, off):
    make(max_steps=1, **off).train()
    assert not (tmp_path / "run" / "training_logs").exists()


@pytest.mark.parametrize(("at_once", "expected"), [(True, 3), (False, 0)])
def test_realtime_logging_does_not_wait_for_the_log(make, tmp_path, at_once, expected):
    path = tmp_path / "rollouts.md"
    trainer = make(max_steps=3, logging_steps=3, rollout_log_path=str(path), realtime_rollout_logging=at_once)
    found = []
    original = trainer.log

    def log(logs, *args):
        trainer.recorder.sink._background.flush()
        found.append(path.read_text(encoding="utf-8").count("\n## ") if path.exists() else 0)
        original(logs, *args)

    trainer.log = log
    trainer.train()
    assert found[0] == expected
    assert path.read_text(encoding="utf-8").count("\n## ") == 3


def test_completions_are_printed_when_asked_for(make, capsys):
    make(max_steps=1, colorize_output=True).train()
    assert capsys.readouterr().out.count("step 0, prompt") == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_weights_log_path": "w.md"}, "token_weights_log_path is w.md, but token_weights is off"),
        ({"attention_diag_log_path": "a.md", "compute_attention_metrics": False}, "no attention is measured in this"),
        ({"rollout_log_path": "/proc/version/a.md"}, "cannot be written to: choose another place"),
    ],
)  # fmt: skip
def test_logs_that_cannot_be_written_are_refused_at_construction(make, changed, message):
    with pytest.raises(ConfigError, match=message):
        make(**changed)


def test_training_goes_on_where_records_cannot_be_written(make, tmp_path, monkeypatch):
    warnings = []
    trainer = make(max_steps=2)
    monkeypatch.setattr("vgr_trl.reporting.recorder.logger.warning", warnings.append)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "rollouts").write_text("a file in the way of the folder")
    monkeypatch.setattr("vgr_trl.reporting.records._free_name", lambda folder: folder / "nowhere")
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(warnings) == 2
    assert "is lost" in warnings[1]
    assert "Rollouts cannot be written (NotADirectoryError" in warnings[0]


FAILING = """
import sys
from support.trainers import config, prompts, vision_trainer

def reward(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 2:
        raise RuntimeError("the reward has failed")
    return [float(row) for row in range(len(completions))]

folder, file, output = sys.argv[1:]
records = {"logging_steps": 100, "rollout_log_steps": 1, "rollout_log_path": output + "/rollouts.md"}
vision_trainer(folder, reward, config(output, max_steps=5, **records), prompts(file)).train()
"""


def test_what_was_recorded_before_an_exception_is_on_disk(model_folder, question_files, tmp_path):
    command = [sys.executable, "-c", FAILING, str(model_folder), train_file(question_files), str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment())
    assert ended.returncode == 1
    assert "the reward has failed" in ended.stderr
    run = read_run(tmp_path / "run")
    assert run.steps() == [(0, "train"), (1, "train")]
    assert run.damaged == 0
    text = (tmp_path / "run" / "rollouts.md").read_text(encoding="utf-8")
    assert re.findall("^## (.*)", text, re.M) == ["Training, step 0", "Training, step 1"]


def test_a_trainer_that_is_dropped_is_not_kept_alive_by_its_records(make):
    trainer = make(max_steps=1)
    trainer.recorder.log({"loss": 1.0}, "train")
    trainer.recorder.sink.flush()
    watched = weakref.ref(trainer.recorder)
    del trainer
    gc.collect()
    assert watched() is None


def test_options_in_the_description_hold_no_secret(make, tmp_path):
    make(max_steps=1, hub_token="hf_secret", compute_attention_metrics=False).train()
    text = (tmp_path / "run" / "rollouts" / "run.json").read_text(encoding="utf-8")
    assert "hf_secret" not in text
    assert json.loads(text)["model"]


def test_before_the_first_step_the_questions_of_evaluations_are_recorded(make, tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    trainer = make(**evaluated)
    trainer.add_callback(RecordBefore(trainer, trainer.recorder.evaluated))
    trainer.train()
    run = read_run(tmp_path / "run")
    assert run.steps() == [(0, "eval"), (0, "train"), (1, "train"), (2, "eval")]
    before, after = run.record(0, "eval"), run.record(2, "eval")
    assert [item.question for item in before.completions] == [item.question for item in after.completions]
    assert [item.prompt for item in before.completions] == [item.prompt for item in after.completions]
    assert all(item.tokens for item in before.completions)
    # The training itself is the one without such a record, and the first evaluation is not mixed with it.
    other = make(**evaluated, output_dir=str(tmp_path / "other"), rollout_log_steps=1)
    other.train()
    assert read_run(tmp_path / "other").steps() == [(0, "train"), (1, "train"), (2, "eval")]
    for name in ("loss", "reward", "eval_reward", "eval_completions/mean_length"):
        assert logged(trainer, name) == logged(other, name) != []
