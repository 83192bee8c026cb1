"""Every recipe trains a step of a tiny model from the command line, in as many passes as it says."""

import json

import pytest

from vgr_trl.cli.__main__ import main
from vgr_trl.recipes import read_recipe, recipe_names
from vgr_trl.registries import rewards

TINY = (
    "--use_cpu --bf16 false --gradient_checkpointing false --num_generations 4 --per_device_train_batch_size 8 "
    "--max_completion_length 8 --max_steps 1 --learning_rate 1e-3 --logging_steps 1 --save_strategy no "
    "--report_to none --disable_tqdm true --compute_attention_metrics false --eval_strategy no "
    "--skip_zero_advantage off"  # passes are counted by their rows
)
SMALLER = {"soft_punish_cache": 2, "noisy_generations": 2}
ROWS = 8


def accuracy_reward(completions, **columns):
    """In place of right answers, which a random model does not give: many values, so that no group is dead."""
    return [sum(map(ord, completion[0]["content"])) % 7 / 7 for completion in completions]


@pytest.mark.parametrize("name", recipe_names())
def test_a_step(name, model_folder, question_files, tmp_path, monkeypatch, passes):
    monkeypatch.setitem(rewards._own, "accuracy", accuracy_reward)
    no_system_prompt = tmp_path / "empty.txt"
    no_system_prompt.touch()
    recipe = read_recipe(name)
    flags = f"--recipe {name} --model_name_or_path {model_folder} --data_files {question_files} {TINY}"
    flags += f" --output_dir {tmp_path / 'run'} --system_prompt_file {no_system_prompt}"
    flags += "".join(f" --{name} {value}" for name, value in SMALLER.items() if name in recipe.options)
    assert main(["train", *flags.split()]) == 0
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["grad_norm"] > 0
    rows = [sum(rows for graded, rows in passes if graded == trains) for trains in (False, True)]
    assert [count / ROWS for count in rows] == list(recipe.about.passes)
