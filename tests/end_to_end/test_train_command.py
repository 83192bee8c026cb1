import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import complete_checkpoints
from support.made_sets import jsonl, skipped_in

from vgr_trl.cli.__main__ import main
from vgr_trl.cli.evaluate import load_for_inference
from vgr_trl.cli.train import suggest_options
from vgr_trl.demo.demo import Questions, draw, draw_questions
from vgr_trl.errors import ConfigError

EVALUATION_PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def flags(model: Path, files: str, output: Path, *more: str) -> list[str]:
    fixed = (
        f"--model_name_or_path {model} --data_files {files} --output_dir {output} --use_cpu --bf16 false "
        "--gradient_checkpointing false --per_device_train_batch_size 8 --num_generations 4 --max_completion_length 8 "
        "--max_steps 2 --logging_steps 1 --report_to none --disable_tqdm true"
    )
    return [*fixed.split(), *more]


def logged(output: Path, name: str) -> list[dict]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if name in entry]


def draw_rows(count: int, folder: Path) -> list[dict]:
    """Questions whose images are saved in a folder, beside which their rows will stand."""
    rows = draw_questions(count, seed=0, split="train")
    for number, row in enumerate(rows):
        row["image"].save(folder / f"{number}.png")
        row["image"] = f"{number}.png"
    return rows


def test_the_command_that_init_prints_for_a_laptop_trains(tmp_path, monkeypatch, capsys):
    questions = draw(0)
    assert len(questions.test) >= 200
    fewer = Questions(questions.train[:32], [], questions.test[:16])
    for name, quick in {"draw": lambda seed: fewer, "warm_up": lambda *arguments: None}.items():
        monkeypatch.setattr(f"vgr_trl.demo.write_folder.{name}", quick)
    monkeypatch.setattr("vgr_trl.demo.write_folder.set_up_process", lambda options: None)  # of all tests
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--laptop"]) == 0
    printed = capsys.readouterr().out.split("vgr-trl ")[-1].split()
    shorter = "--max_steps 2 --eval_steps 2 --save_steps 1 --max_completion_length 4 --per_device_train_batch_size 16"
    assert main([*printed, *shorter.split()]) == 0
    evaluated = logged(Path("runs/first"), "eval_rewards/accuracy_reward/mean")
    assert [entry["step"] for entry in evaluated] == [0, 2], "accuracy can be compared"
    assert complete_checkpoints(Path("runs/first")), "to resume from"


def test_from_a_file_to_a_trained_model_an_evaluation_and_a_page(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda page: pytest.fail("not on a terminal"))
    renamed = {"problem": "question", "solution": "answer", "image": "image"}
    rows = draw_rows(12, tmp_path)
    jsonl(tmp_path / "my.jsonl", [{theirs: row[ours] for ours, theirs in renamed.items()} for row in rows])
    assert main(["quickstart", "my.jsonl"]) == 1
    assert "--model" in capsys.readouterr().err
    shorter = "--max_steps 1 --per_device_train_batch_size 8 --max_completion_length 4 --system_prompt_file none"
    assert main(["quickstart", "my.jsonl", "--model", str(model_folder), *shorter.split()]) == 0
    run, screen = Path("runs/quickstart"), capsys.readouterr().out
    assert (run / "model.safetensors").is_file()
    assert f"{run}/report.html" in screen
    evaluated = logged(run, "eval_rewards/accuracy_reward/mean")
    assert [entry["step"] for entry in evaluated] == [0, 1], "before and after, on rows that are not trained on"
    assert "training 11 rows, evaluation 1 rows" in " ".join(screen.split())
    again = shlex.split(re.search(r"^ *vgr-trl (train .*)$", screen, re.M)[1])
    assert again.count("--max_steps") == 1, "the user's, without the one that was chosen"
    assert main([*again, "--dry_run", "--output_dir", "other"]) == 0, "the command to go on from"


@pytest.mark.parametrize(
    ("parameters", "gigabytes", "device", "expected"),
    [
        (3e5, 8, "cpu", {"use_cpu": "true", "use_peft": None, "max_completion_length": "64"}),
        (4e9, 24, "cuda", {"use_peft": "true", "dtype": "bfloat16", "per_device_train_batch_size": "4"}),
        (4e9, 140, "cuda", {"use_peft": None, "dtype": "float32", "per_device_train_batch_size": "8"}),
    ],
)
def test_sizes_fit_the_machine(parameters, gigabytes, device, expected):
    options = suggest_options(parameters, gigabytes * 1e9, device)
    assert {name: options.get(name) for name in expected} == expected
    assert int(options["per_device_train_batch_size"]) * int(options["gradient_accumulation_steps"]) == 64
    with pytest.raises(ConfigError):
        suggest_options(32e9, 24e9, "cuda")


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_with_bad_boxes_are_left_out_and_listed_where_boxes_are_read(model_folder, tmp_path, streaming):
    boxes = [[0, 0, 1, 0.5], [0, 0, 2, 0.5], [0.5, 0, 1], None, "left", [0, 0, float("nan"), 1], [[0, 0, 1, 1]], 4]
    rows = draw_rows(16, tmp_path)
    file = jsonl(tmp_path / "train.jsonl", [{**row, "bbox": boxes[n % 8]} for n, row in enumerate(rows)])
    read = f"--dataset_streaming {streaming} --max_steps 4"
    for rewards, bad in (("region format", {1, 2, 4, 5, 7}), ("format", set())):
        output = tmp_path / rewards.split()[0]
        more = f"--reward_funcs {rewards} {read}".split()
        assert main(["train", *flags(model_folder, f"train={file}", output, *more)]) == 0
        rows = skipped_in(output) if bad else []
        assert (output / "skipped.jsonl").exists() is bool(bad)
        assert {row["row"] for row in rows} == bad | {place + 8 for place in bad}
        assert all("in its column bbox: give " in row["reason"] for row in rows)


def test_a_run_that_collapses_ends_with_the_sign_if_it_shall(model_folder, question_files, tmp_path, capsys):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def format_reward(completions, trainer_state, **kwargs):\n"
        "    return [float(trainer_state.global_step < 16) * (index % 2) for index in range(len(completions))]\n"
    )
    output = tmp_path / "run"
    more = f"--reward_funcs {rewards}:format_reward --max_steps 30 --stop_on_collapse --compute_attention_metrics false"
    assert main(["train", *flags(model_folder, question_files, output, *more.split())]) == 1
    said, message = capsys.readouterr()
    assert re.findall(r"^step (\d+)/30", said, re.M)[-1] == "21"
    dictionaries = [ast.literal_eval(line) for line in said.splitlines() if line.startswith("{'loss")]
    assert len(dictionaries) == 21, "the flags switch the bar off, as those who read TRL's dictionaries do"
    assert {"loss", "grad_norm", "entropy", "completions/clipped_ratio"} <= dictionaries[0].keys()
    assert "at step 21: format_reward fell from 0.5 to 0.188 (means of 8 steps)" in message
    assert message.endswith("Training stopped; no model was saved.\n")
    assert not (output / "model.safetensors").exists()


def test_lora_from_a_config_file_and_evaluation_of_the_adapter(
    model_folder, question_files, tmp_path, capsys, monkeypatch
):
    output, settings, numbers = (tmp_path / name for name in ("run", "lora.yaml", "numbers.json"))
    settings.write_text("use_peft: true\nlora_target_modules: [q_proj, v_proj]\nlora_r: 2\nmax_steps: 7\n")
    more = ("--config", str(settings), "--reward_funcs", "format", "length")
    assert main(["train", *flags(model_folder, question_files, output, *more)]) == 0
    assert len(logged(output, "loss")) == 2, "the flag --max_steps 2 overrides the file"
    model, _ = load_for_inference(str(output))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=3.0)
    model.save_pretrained(output)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        models = [load_for_inference(str(folder))[0] for folder in (model_folder, output)]
        logits = [each(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for each in models]
    assert (logits[0] - logits[1]).abs().max() > 1e-3, "the adapter is on the base model"
    assert main(["merge", str(model_folder)]) == 1
    assert "is no LoRA adapter" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["merge", str(output), "--output_dir", "runs/first/merged"]) == 0
    (snippet,) = re.findall(r"```python\n(.*?)```", EVALUATION_PAGE.read_text(encoding="utf-8"), re.DOTALL)[:1]
    merged: dict[str, Any] = {}
    exec(snippet, merged)
    with torch.no_grad():
        found = merged["model"](input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(found, logits[1], rtol=1e-4, atol=1e-4)
    assert "lora" not in " ".join(name for name, _ in merged["model"].named_parameters())
    assert main(["merge", str(output), "--output_dir", "runs/first/merged"]) == 1, "the folder is there"
    evaluation = f"--model_name_or_path {output} --data_files {question_files} --num_samples 2 --output_file {numbers}"
    assert main(["evaluate", *evaluation.split(), "--max_completion_length", "4", "--group_by", "family"]) == 0
    assert "mean@2" in capsys.readouterr().out
    result = json.loads(numbers.read_text())
    assert (result["questions"], result["k"]) == (6, 2)
    assert sum(group["questions"] for group in result["groups"].values()) == 6
    assert "records" not in result


@pytest.mark.parametrize("saves", [False, True])
def test_ctrl_c_names_a_saved_checkpoint(model_folder, question_files, tmp_path, capsys, saves, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("vgr_trl.callbacks.trackers.StepLines.on_train_end", interrupt, raising=False)
    more = f"--reward_funcs format --save_steps {1 if saves else 9} --compute_attention_metrics false".split()
    more += [] if saves else ["--save_strategy", "no"]
    assert main(["train", *flags(model_folder, question_files, tmp_path, *more)]) == 130
    said = capsys.readouterr().err
    assert (f"interrupted; --resume_from_checkpoint continues from {tmp_path}/checkpoint-2." in said) == saves
    assert ("--resume_from_checkpoint" in said) == saves


def test_another_run_in_the_folder_is_refused_and_resume_continues_it(model_folder, question_files, tmp_path, capsys):
    output = tmp_path / "run"
    arguments = flags(model_folder, question_files, output, "--save_steps", "1")
    assert main(["train", *arguments, "--eval_on_start"]) == 0, "there is nothing to evaluate on"
    assert main(["train", *arguments]) == 1
    assert "holds a run (trainer_state.json)" in capsys.readouterr().err
    assert main(["train", *arguments, "--resume_from_checkpoint"]) == 1
    assert "has the model after all 2 steps; raise max_steps" in capsys.readouterr().err
    assert main(["train", *arguments, "--max_steps", "4", "--resume_from_checkpoint"]) == 0
    assert "continued from" in " ".join(capsys.readouterr().out.split())
    assert len(logged(output, "loss")) == 4
    more = "--max_steps 5 --resume_from_checkpoint --eval_on_start --eval_strategy steps --eval_steps 9".split()
    assert main(["train", *arguments, *more]) == 0
    assert "evaluation at step 4" not in capsys.readouterr().out, "it was evaluated before the interruption"
    assert main(["train", *arguments, "--resume_from_checkpoint", "latest", "--reward_funcs", "format"]) == 1
    assert "has a run in it with reward_funcs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--reward_weights 1.0", "accuracy_reward, think_format_reward"),
        ("--max_prompt_length 5", "max_prompt_length=5 leaves no row"),
        ("--lora_r 8 --max_train_rows 1", "Without effect: lora_r. Add --use_peft"),
    ],
)
def test_bad_input_is_one_sentence_and_trains_nothing(model_folder, question_files, tmp_path, capsys, more, message):
    output = tmp_path / "run"
    assert main(["train", *flags(model_folder, question_files, output, *more.split())]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (output / "trainer_state.json").exists()
