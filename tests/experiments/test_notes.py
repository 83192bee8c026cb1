"""What our users' notes say literally: flag lines of scripts, their paths, keys of configurations of EasyR1.

Lines are run as they are typed: only model, data and size are those of a test.
"""

import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from PIL import Image

from vgr_trl.cli.__main__ import main
from vgr_trl.cli.arguments import DataArguments, parse
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.data.load import load_split

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
NOTES = yaml.safe_load(Path(__file__).with_name("lines.yaml").read_text(encoding="utf-8"))
LINES = {name: line.format_map(NOTES) for name, line in NOTES["lines"].items()}
REWARDS = {"MDI": ["accuracy_reward", "think_format_reward", "mdi_reward"]}
REWARDS["MDI with adapters"] = REWARDS["MDI"]
HARD = ("experiment 4", "dapo_train")


def run_example(script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert ended.value.code == 0


def rewarded_step(output: Path) -> dict:
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    (logged,) = [entry for entry in history if "reward" in entry]
    return logged


@pytest.mark.parametrize("name", LINES)
def test_every_line_trains_a_small_model(name, model_folder, question_files, tmp_path, monkeypatch):
    script, *flags = shlex.split(LINES[name])
    if "--dataset_name" in flags:
        at = flags.index("--dataset_name")
        flags[at : at + 2] = []
    no_system_prompt = tmp_path / "none.txt"
    no_system_prompt.touch()
    smaller = f"""--model_name_or_path {model_folder} --data_files {question_files}
        --system_prompt_file {no_system_prompt} --max_steps 1 --max_completion_length 52
        --per_device_train_batch_size 4 --gradient_accumulation_steps 4
        --num_generations 8 --use_cpu true --bf16 false --dtype float32 --report_to none --num_completions_to_print 0
    """
    monkeypatch.chdir(tmp_path)
    run_example(script, [*flags, *shlex.split(smaller)], monkeypatch)
    output = Path(flags[flags.index("--output_dir") + 1])
    logged = rewarded_step(output).items()
    weights = {key.split("/")[1]: value for key, value in logged if key.startswith("reward_weights/")}
    if name in REWARDS:
        assert weights == dict(zip(REWARDS[name], [4.0, 1.0, 1.0], strict=True))
    else:
        attention = "vgr_hard_negative_reward" if name in HARD else "vgr_reward"
        tags = ["tag_count_reward"] if name == "dapo_train" else []
        names = ["accuracy_reward", attention, "think_format_reward", *tags, "soft_overlong_punishment_reward"]
        at = flags.index("--early_reward_weights") + 1
        assert weights == dict(zip(names, map(float, flags[at : at + len(names)]), strict=True))
        options = json.loads((output / "rollouts" / "run.json").read_text(encoding="utf-8"))["options"]
        assert options["attention_reward_scale"] == "none"
        assert "## Training, step 0" in Path("training_logs/1/rollout_results.md").read_text(encoding="utf-8")
        assert "## Evaluation, step 1" in Path("training_logs/1/eval_results.md").read_text(encoding="utf-8")
    if "lora" in LINES[name]:
        adapter = json.loads((output / "adapter_config.json").read_text(encoding="utf-8"))
        assert sorted(adapter["target_modules"]) == ["q_proj", "v_proj"]


@pytest.mark.parametrize(("flags", "names"), NOTES["weights"].items())
def test_weights_without_names_of_the_earlier_scripts(flags, names):
    earlier_rewards = runpy.run_path(str(EXAMPLES / "train_grpo_vlm.py"))["earlier_rewards"]
    expected = ["--reward_funcs", *names.split(), "--attention_reward_scale", "none"] if names else []
    assert earlier_rewards(flags.split()) == expected


@pytest.mark.parametrize("words", ["(0.5,2.0)", "(0.5, 2.0)", "0.5,2.0", "0.5 2.0", "[0.5,2.0]"])
def test_two_numbers_in_one_word_and_in_two(words):
    flags = "--output_dir runs --use_cpu true --bf16 false --token_weight_clip"
    given = [*flags.split(), *([words] if "," in words else words.split())]
    assert parse((DataArguments, DAPOConfig), "train", given)[1].token_weights_clip == [0.5, 2.0]


def test_the_paths_of_earlier_scripts_lead_to_ours():
    for name in ("train_grpo_vlm.py", "dapo_train.py", "grpo_vlm.py", "prepare_aokvqa_for_trl.py"):
        assert (REPOSITORY / "src" / "scripts" / name).samefile(EXAMPLES / name)
    for folder in ("src/configs", "examples/accelerate_configs"):
        for name in ("deepspeed_zero2.yaml", "deepspeed_zero3.yaml"):
            assert (REPOSITORY / folder / name).samefile(REPOSITORY / "accelerate_configs" / name)
    for name in ("grpo_vlm.py", "grpo_vlm_2.py"):
        assert (EXAMPLES / "scripts" / name).samefile(EXAMPLES / "grpo_vlm.py")
    for name in ("prepare_aokvqa_for_trl.py", "train_grpo_vlm.py"):
        assert (REPOSITORY / name).samefile(EXAMPLES / name)
    for name in (*(f"experiment{number}.sh" for number in range(1, 6)), "dapo_train.sh", "data.sh"):
        assert (REPOSITORY / name).samefile(REPOSITORY / "experiments" / name)


def test_a_reward_of_theirs_reads_the_balance_from_the_trainer(model_folder, question_files, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def balance_reward(completions, **kwargs):\n"
        "    balances = kwargs['trainer']._mdi_balance_scores_current_batch\n"
        "    assert balances == kwargs.get('mdi_balance') and len(balances) == len(completions)\n"
        "    return [2.0 * balance - 1.0 for balance in balances]\n",
        encoding="utf-8",
    )
    flags = f"""train --model_name_or_path {model_folder} --data_files {question_files} --output_dir {tmp_path / "run"}
        --reward_funcs {rewards}:balance_reward --use_cpu true --bf16 false --max_steps 1 --num_generations 4
        --max_completion_length 4 --per_device_train_batch_size 8 --report_to none --eval_strategy steps"""
    assert main(flags.split()) == 0
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    for prefix in ("", "eval_"):
        (logged,) = [entry for entry in history if f"{prefix}reward" in entry]
        expected = 2 * logged[f"{prefix}attention/late/mdi_balance"] - 1
        assert logged[f"{prefix}rewards/balance_reward/mean"] == pytest.approx(expected, abs=1e-6)


def test_the_set_is_prepared_by_their_script_and_read(tmp_path, monkeypatch):
    raw = tmp_path / "raw"
    raw.mkdir()
    for split, count in (("train", 5), ("validation", 3)):
        same = {"question": "What colour is it?", "choices": ["red", "blue"], "correct_choice_idx": 1}
        images = [Image.new("RGB", (32 if number else 1025, 8), (40 * number, 0, 0)) for number in range(count)]
        rows = [{**same, "image": image, "question_id": f"{split}{n}"} for n, image in enumerate(images)]
        Dataset.from_list(rows).to_parquet(raw / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    Path("ids.txt").write_text("train0\ntrain2\ntrain3\nvalidation1\n", encoding="utf-8")
    flags = f"--dataset_path {raw} --out_dir ./aokvqa_trl_data --question_id_file {tmp_path}/ids.txt --subset_size 2"
    run_example("prepare_aokvqa_for_trl.py", [*flags.split(), "--filter_big_images", "--workers", "0"], monkeypatch)
    found = {split: load_split(split, dataset_path="aokvqa_trl_data") for split in ("train", "validation")}
    ids = {split: rows["id"][:] for split, rows in found.items()}
    assert ids == {"train": ["train2", "train3"], "validation": ["validation1"]}
    Path("ids.txt").write_text("train3\n", encoding="utf-8")
    run_example("prepare_aokvqa_for_trl.py", [*flags.replace("_data", "_train").split(), "--workers", "0"], monkeypatch)
    assert load_split("train", dataset_path="aokvqa_trl_train")["id"][:] == ["train3"]
    rows, skipped = prepare_rows(found["train"])
    assert (len(rows), skipped) == (2, [])
