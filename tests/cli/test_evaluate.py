import json
import shutil

import pytest
from support.commands import train_command

from vgr_trl.cli import evaluate as command
from vgr_trl.cli.__main__ import main
from vgr_trl.data.prompts import SYSTEM_PROMPT
from vgr_trl.reporting.page import write_report


@pytest.fixture
def run(model_folder, question_files, tmp_path, monkeypatch):
    loaded = []
    load = command.load_for_inference
    monkeypatch.setattr(command, "load_for_inference", lambda *a, **k: loaded.append(a[0]) or load(*a, **k))

    def evaluated(*models, more=()):
        flags = f"--data_files {question_files} --num_samples 2 --max_completion_length 4 --batch_size 3"
        flags += f" --output_file {tmp_path / 'numbers.json'}"
        loaded.clear()
        assert main(["evaluate", "--model_name_or_path", *map(str, models), *flags.split(), *more]) == 0
        return json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8")), list(loaded)

    return evaluated


def test_checkpoints_stand_side_by_side_by_family(run, model_folder, tmp_path, capsys):
    other = shutil.copytree(model_folder, tmp_path / "other")
    numbers, loaded = run(model_folder, other, more=["--reward_funcs", "format", "length", "--save_completions"])
    assert loaded == [str(model_folder), str(other)]
    first, second = numbers["models"].values()
    assert first == second
    page = write_report([tmp_path / "numbers.json"], tmp_path / "page.html")
    assert (page.records, page.notes[f"numbers: {model_folder}"]) == (2, [])
    assert first["records"][0]["images"][0]["thumbnail"]
    assert first["records"][0]["prompt"]
    low, high = first["interval"]
    assert 0 <= low <= first["accuracy"] <= high <= 1
    assert first["blind"] is not None
    assert list(first["rewards"]) == ["think_format_reward", "soft_overlong_punishment_reward"]
    assert len(first["groups"]) > 1, "families are shown without being asked for"
    assert sum(group["questions"] for group in first["groups"].values()) == first["questions"] == 6
    printed = capsys.readouterr().out
    assert all(heading in printed for heading in ("95 %", "majority", "blind", "mean@2", "think_format_reward"))


def test_the_file_of_a_training_is_taken_without_what_is_of_training(model_folder, question_files, tmp_path, capsys):
    file, numbers = tmp_path / "train.yaml", tmp_path / "numbers.json"
    options = {
        "model_name_or_path": str(model_folder), "data_files": question_files, "max_completion_length": 4,
        "reward_funcs": ["accuracy", "format", "vgr"], "learning_rate": 1e-5, "num_generations": 4,
    }  # fmt: skip
    file.write_text(json.dumps(options))
    flags = f"--config {file} --num_samples 0 --blind_baseline false --output_file {numbers} --beta 0.1"
    assert main(["evaluate", *flags.split()]) == 0
    assert json.loads(numbers.read_text())["questions"] == 6
    assert "vgr" not in json.loads(numbers.read_text())["rewards"]
    said = capsys.readouterr().err
    assert "Without effect here: learning_rate, num_generations, reward_funcs.\n" in said
    assert "Without effect here: beta.\n" in said
    assert main(["evaluate", "--config", str(file), "--save_completions"]) == 1
    assert "give --output_file" in capsys.readouterr().err
    file.write_text(json.dumps({**options, "num_sample": 2}))
    assert main(["evaluate", *flags.split()]) == 1
    assert "has num_sample, which is not an option. Did you mean num_samples?" in capsys.readouterr().err


@pytest.fixture
def system_prompts(run, monkeypatch):
    prompts = []
    evaluate = command.evaluate
    monkeypatch.setattr(command, "evaluate", lambda *a, **k: prompts.extend(a[2]["prompt"]) or evaluate(*a, **k))

    def seen(model, *more):
        prompts.clear()
        run(model, more=[*more, "--num_samples", "0", "--blind_baseline", "false"])
        return {turn["content"] for prompt in prompts for turn in prompt if turn["role"] == "system"}

    return seen


def test_a_run_is_evaluated_with_its_own_system_prompt(system_prompts, model_folder, question_files, tmp_path, capsys):
    output, text = tmp_path / "out", tmp_path / "prompt.txt"
    for prompt in ("none", text):
        text.write_text("look at the image {{ letters | length }}", encoding="utf-8")
        shutil.rmtree(output, ignore_errors=True)
        flags = f"--system_prompt_file {prompt} --eval_strategy no --save_steps 1"
        command_line = train_command(model_folder, question_files, output, f"{flags} --max_steps 1")[2:]
        assert main(["train", *command_line]) == 0
        text.write_text("changed since", encoding="utf-8")
        own = set() if prompt == "none" else {"look at the image 4"}
        for folder in (output, output / "checkpoint-1"):
            capsys.readouterr()
            assert system_prompts(folder) == own
            assert f"{folder} was trained with" in capsys.readouterr().err
    assert system_prompts(output, "--prompt_language", "en") == {SYSTEM_PROMPT}
    assert system_prompts(model_folder) == {SYSTEM_PROMPT}, "a model that no run has written"


def test_a_set_without_the_split_names_the_flag_that_is_read(model_folder, question_files, capsys):
    (train,) = [part.removeprefix("train=") for part in question_files.split(",") if part.startswith("train=")]
    assert main(["evaluate", "--model_name_or_path", str(model_folder), "--data_files", train]) == 1
    assert "--dataset_test_split train" in capsys.readouterr().err
