"""The folder of a run, and what it evaluates on, from the flags of a user."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, load_dataset

from vgr_trl.checkpoints import how_to_go_on, resolve_checkpoint, write_manifest
from vgr_trl.cli.__main__ import main
from vgr_trl.cli.train import check_output_dir, write_identity
from vgr_trl.data.load import train_test_split
from vgr_trl.data.rows import prepare_rows
from vgr_trl.reporting.records import read_run
from vgr_trl.utils import ConfigError

HUB = Path("lujunxi57") / "DDM"
RUN = {"model": "m", "data": "d", "reward_funcs": ["accuracy"]}


def test_the_folder_of_another_run_is_refused(tmp_path):
    check_output_dir(tmp_path, RUN, None)
    write_identity(tmp_path, RUN)
    check_output_dir(tmp_path, RUN, None)  # a run that failed before its first checkpoint leaves nothing to lose
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ConfigError, match=re.escape("holds a run (checkpoint-3): choose another output_dir, or")):
        check_output_dir(tmp_path, RUN, None)
    check_output_dir(tmp_path, RUN, "latest")
    with pytest.raises(ConfigError, match="holds a run with model 'm', but 'other' was given"):
        check_output_dir(tmp_path, {**RUN, "model": "other"}, "latest")
    assert json.loads((tmp_path / "run.json").read_text()) == RUN
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="run.json cannot be read"):
        check_output_dir(tmp_path, RUN, "latest")


def test_a_run_that_is_interrupted_goes_on_from_a_checkpoint_only_if_there_is_one(tmp_path):
    assert "--resume_from_checkpoint" not in how_to_go_on(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    assert "--resume_from_checkpoint" not in how_to_go_on(tmp_path), "it was being written"
    (tmp_path / "checkpoint-3" / "rng_state.pth").touch()
    write_manifest(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-4").mkdir()
    assert how_to_go_on(tmp_path) == f"--resume_from_checkpoint continues from {tmp_path / 'checkpoint-3'}"


def test_a_finished_run_of_trl_and_a_file_are_refused_too(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds a run \\(model.safetensors\\)"):
        check_output_dir(tmp_path, RUN, None)
    for place in ("model.safetensors", "model.safetensors/below"):
        with pytest.raises(ConfigError, match="model.safetensors cannot be written to"):
            check_output_dir(tmp_path / place, RUN, None)
    with pytest.raises(ConfigError, match="no complete checkpoint, only a finished run"):
        resolve_checkpoint("latest", tmp_path)


def test_a_demo_may_be_repeated_in_its_own_folder_only(tmp_path):
    demo = {"command": "demo"}
    check_output_dir(tmp_path, demo, None, may_repeat=True)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds a run \\(model.safetensors\\): choose another output_dir.$"):
        check_output_dir(tmp_path, demo, None, may_repeat=True)
    write_identity(tmp_path, demo)
    check_output_dir(tmp_path, demo, None, may_repeat=True)


@pytest.fixture
def rows(question_files):
    return load_dataset("parquet", data_files=question_files.split(",")[0].split("=")[1], split="train")


@pytest.fixture
def train(model_folder, tmp_path, monkeypatch, capsys):
    """Train one step; a folder of the name of a hub data set stands for the hub, as `datasets` has it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()

    def run(*flags: str) -> tuple[str, Path]:
        fixed = (
            f"--model_name_or_path {model_folder} --output_dir out --use_cpu --bf16 false --save_strategy no "
            "--gradient_checkpointing false --per_device_train_batch_size 4 --per_device_eval_batch_size 4 "
            "--num_generations 4 --max_completion_length 4 --max_steps 1 --logging_steps 1 --report_to none "
            "--disable_tqdm true --system_prompt_file empty.txt"
        )
        assert main(["train", *fixed.split(), *flags]) == 0
        out, err = capsys.readouterr()
        return " ".join((out + err).split()), tmp_path / "out"

    return run


def evaluated(output: Path) -> bool:
    return "eval_reward" in json.loads((output / "metrics.json").read_text())


def save(rows: Dataset, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(file)


@pytest.mark.parametrize("flags", [(), ("--eval_strategy", "steps", "--eval_steps", "1")])
def test_a_hub_data_set_without_test_is_split(train, rows, tmp_path, flags):
    save(rows.select(range(10)), tmp_path / HUB / "train.parquet")
    said, output = train("--dataset_name", str(HUB), *flags)
    assert "The data have no split test: 1 of 10 rows are held out of training for it, by image and seed 42." in said
    assert ("It is evaluated every epoch" in said) is (flags == ())
    assert "9 rows to train on, 1 rows to evaluate on" in said
    assert evaluated(output)


def test_a_folder_with_test_is_evaluated_unless_told_otherwise(train, rows, tmp_path):
    save(rows.select(range(8)), tmp_path / "set" / "train.parquet")
    save(rows.select(range(8, 10)), tmp_path / "set" / "test.parquet")
    said, output = train("--dataset_path", "set")
    assert "The data have the split test. It is evaluated every epoch" in said
    assert "8 rows to train on, 2 rows to evaluate on" in said
    assert evaluated(output)
    assert "before step 1 4 completions of the data to evaluate on" in said
    assert (0, "eval") in read_run(output).steps()
    said, output = train("--dataset_path", "set", "--eval_strategy", "no", "--output_dir", "other")
    assert "evaluated" not in said
    assert "before step 1" not in said


def test_a_split_without_answers_is_no_reason_to_stop(train, rows, tmp_path):
    blank = rows.select(range(8, 10)).map(lambda row: {"solution": None}, features=rows.features)
    save(rows.select(range(8)), tmp_path / "set" / "train.parquet")
    save(blank, tmp_path / "set" / "test.parquet")
    said, output = train("--dataset_path", "set")
    assert "Nothing is evaluated: None of the 2 rows of the test data can be used" in said
    assert not evaluated(output)


def test_a_test_file_that_is_not_evaluated_is_said(train, question_files):
    said, output = train("--data_files", question_files)
    assert "test= is given, but nothing is evaluated, because eval_strategy is no: add --eval_strategy steps." in said
    assert not evaluated(output)


def test_a_batch_that_trl_would_refuse_is_said(train, rows, tmp_path):
    save(rows.select(range(10)), tmp_path / HUB / "train.parquet")
    said, _ = train("--dataset_name", str(HUB), "--eval_num_generations", "3")
    assert "Nothing is evaluated, because a batch of 4 completions (per_device_eval_batch_size) is no multiple" in said
    assert "10 rows to train on" in said


def test_rows_that_share_an_image_stay_on_one_side(rows):
    many = rows.select([number % 5 for number in range(20)])
    prepared, _ = prepare_rows(many)
    for seed in range(4):
        left, right = train_test_split(prepared, seed)
        shown = [{row["image"].tobytes() for row in side} for side in (left, right)]
        assert not shown[0] & shown[1]
        assert (len(left), len(right)) == (16, 4)  # an image has four rows, the smallest share above none
    again = train_test_split(prepared, 1)[1]
    assert again["problem"] == train_test_split(prepared, 1)[1]["problem"]
    text, _ = prepare_rows(Dataset.from_dict({"question": [f"q{n}" for n in range(20)], "answer": ["x"] * 20}))
    assert tuple(map(len, train_test_split(text, 0))) == (18, 2)


def test_data_of_text_alone_train_without_the_reward_that_needs_images(train, tmp_path):
    rows = [{"question": "what colour", "answer": "red"}] * 8
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for more in ((), ("--reward_weights", "2.5", "1", "0.5", "1"), ("--dataset_streaming",)):
        said, _ = train("--data_files", "text.jsonl", "--output_dir", f"out{len(more)}", *more)
        assert "The data have no images: the reward vgr, which needs them, is left out, and its weight with it." in said
        weights = "accuracy_reward x 2.5, think_format_reward x 0.5" if len(more) > 2 else "accuracy_reward, think"
        assert "vgr_reward" not in said
        assert weights.split(",")[0] in said


def test_a_named_reward_that_needs_images_is_refused_on_text(tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("\n".join(['{"question": "what", "answer": "red"}'] * 8))
    flags = f"--model_name_or_path {model_folder} --data_files text.jsonl --output_dir out --use_cpu --bf16 false"
    assert main(["train", *flags.split(), "--reward_funcs", "accuracy", "vgr", "--report_to", "none"]) == 1
    assert "the reward vgr_reward cannot be used here" in capsys.readouterr().err


def test_other_data_are_evaluated_greedily(train, rows, tmp_path):
    save(rows.select(range(8)), tmp_path / "set" / "train.parquet")
    save(rows.select(range(8, 11)), tmp_path / "other.parquet")
    said, output = train(
        "--dataset_path", "set", "--dataset_test_split", "train", "--test_dataset", "other.parquet",
        "--eval_temperature", "0", "--eval_num_generations", "1",
    )  # fmt: skip
    assert "8 rows to train on, 3 rows to evaluate on" in said
    assert evaluated(output)
