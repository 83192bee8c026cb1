import json
import math
import re
import runpy
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
import trl
import yaml
from packaging.version import Version
from safetensors.torch import load_file
from support.trainers import train_file
from trl import ModelConfig

from vgr_trl.cli.__main__ import main
from vgr_trl.cli.arguments import DataArguments, RewardArguments, RunArguments, parse
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.recipes import TEMPLATES, load_recipe, read_recipe, recipe_names
from vgr_trl.registries import rewards as reward_registry

ROOT = Path(__file__).parents[2]
TINY = (
    "--use_cpu --bf16 false --gradient_checkpointing false --num_generations 4 --per_device_train_batch_size 8 "
    "--max_completion_length 8 --max_steps 1 --learning_rate 1e-3 --logging_steps 1 --save_strategy no "
    "--report_to none --disable_tqdm true --compute_attention_metrics false --eval_strategy no "
    "--check_pixels false --skip_zero_advantage off"  # passes are counted by their rows
)
SMALLER = {"soft_punish_cache": 2, "noisy_generations": 2, "warmup_ratio": 0, "warmup_steps": 0}
LEFT = yaml.safe_load(Path(__file__).with_name("traces.yaml").read_text(encoding="utf-8"))
ROWS = 8


def parsed(*argv):
    groups = (RunArguments, DataArguments, RewardArguments, DAPOConfig, ModelConfig)
    return parse(groups, "train", ["--use_cpu", "--bf16", "false", *argv])[1:4]


def values_of(groups):
    return {name: value for group in groups for name, value in vars(group).items()}


def test_every_recipe_says_what_it_is_and_has_known_options(tmp_path):
    for name in recipe_names():
        recipe = read_recipe(name)
        assert recipe.about is not None
        assert recipe.about.method
        assert re.match(r"https://arxiv.org/abs/\d{4}\.\d{5}$|experiments/\w+\.sh$", recipe.about.paper)
        data, rewards, config = parsed("--recipe", name, "--output_dir", str(tmp_path))
        assert len(config.reward_weights or [1]) == len(rewards.reward_funcs)
        own = {option: value for option, value in recipe.options.items() if option != "reward_funcs"}
        read = values_of([data, rewards, config])
        assert read | own == read, name


def test_a_recipe_gives_way_to_the_file_and_both_to_flags(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: vppo\nlearning_rate: 2.0e-6\nentropy_penalty_coef: 0.12\n")
    _, rewards, config = parsed("--config", str(file), "--learning_rate", "3e-6")
    assert rewards.reward_funcs == ["accuracy"]
    assert config.trajectory_scaling_min == 0.9  # of the recipe
    assert config.entropy_penalty_coef == 0.12  # of the file
    assert config.learning_rate == 3e-6
    assert parsed(f"--config={file}", "--recipe=tprl")[2].trajectory_scaling_min == 0.8


@pytest.mark.parametrize("template", ["laptop", "gpu"])
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_keeps_its_rewards_over_the_file_that_init_writes(name, template, tmp_path, capsys):
    text = (TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8")
    file = tmp_path / "train.yaml"
    file.write_text(text.format(name=file, tiny=tmp_path, generation="seed: 42"))
    recipe = load_recipe(name)
    _, rewards, config = parsed("--recipe", name, "--config", str(file))
    assert (rewards.reward_funcs, config.reward_weights) == (recipe["reward_funcs"], recipe.get("reward_weights"))
    for option in ("perturbation", "credit_rules", "token_weights", "early_reward_weights"):
        assert option not in recipe or getattr(config, option) == recipe[option]
    is_same = yaml.safe_load(file.read_text())["reward_weights"] == recipe.get("reward_weights")
    assert is_same or f"reward_funcs, reward_weights of {file} are not used" in capsys.readouterr().err
    kept = parsed("--recipe", name, "--config", str(file), "--reward_funcs", "vgr", "--reward_weights", "3")
    assert (kept[1].reward_funcs, kept[2].reward_weights) == (["vgr"], [3.0])


def test_a_file_that_states_another_method_than_its_recipe_is_refused(tmp_path):
    file = tmp_path / "train.yaml"
    for recipe, text in (("mdi", "reward_funcs: [accuracy, format]"), ("vppo", "enable_perception_filtering: false"),
                         ("papo", "perturbation: remove_image")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"the recipe {recipe} has"):
            parsed("--recipe", recipe, "--config", str(file))
    file.write_text("reward_funcs: accuracy\ntop_p_perception_tokens: 0.2\n")  # the same reward, another number
    assert parsed("--recipe", "vppo", "--config", str(file))[2].top_p_perception_tokens == 0.2


def test_a_stated_warmup_displaces_the_other_spelling(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("warmup_steps: 3\n")
    config = parsed("--recipe", "mdi", "--config", str(file))[2]  # the recipe has warmup_ratio 0.05
    assert (config.warmup_steps, config.warmup_ratio) == (3, None)
    config = parsed("--recipe", "mdi", "--config", str(file), "--warmup_ratio", "0.1")[2]
    assert config.warmup_steps == 0.1
    with pytest.raises(ConfigError):
        parsed("--warmup_steps", "3", "--warmup_ratio", "0.1")


def test_a_recipe_of_ones_own_with_the_options_of_its_plug_ins(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from vgr_trl.registries import declares\n"
        "@dataclass\nclass Options:\n    mine_share: float = field(default=1.0, metadata={'help': 'A share.'})\n"
        "@declares(options=Options)\ndef rule(advantages, signals, mask, options):\n    return mask * 1.0, {}\n"
    )
    file = tmp_path / "mine.yaml"
    file.write_text(f"credit_rules: ['{tmp_path}/mine.py:rule']\nplugin_options: {{mine_share: 0.5}}\n")
    assert parsed("--recipe", str(file))[2].plugin_options == {"mine_share": 0.5}
    given = parsed("--recipe", str(file), "--plugin_options", '{"mine_share": 0.25}')[2].plugin_options
    assert json.loads(given) == {"mine_share": 0.25}
    for text in ("about: {method: mine}\n", "- a\n", "a: ["):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_recipe(str(file))


@pytest.mark.parametrize(("name", "script"), [("vgr", "experiment3"), ("mdi", "mdi"), ("tprl", "tprl")])
def test_recipes_of_our_users_are_their_scripts(name, script, tmp_path):
    texts = [(ROOT / "experiments" / f"{file}.sh").read_text() for file in ("common", script)]
    words = shlex.split(texts[0].split("COMMON=(")[1].split(")\n")[0])
    words += shlex.split(texts[1].split('"${COMMON[@]}"')[1].split('"${OVERRIDES[@]}"')[0].replace("\\\n", " "))
    theirs, ours = (values_of(parsed(*given)) for given in (words, ["--recipe", name, "--output_dir", str(tmp_path)]))
    for option in load_recipe(name):
        assert theirs[option] == ours[option], option
    if name != "tprl":
        assert load_recipe(f"{name}_scaled") == {**load_recipe(name), "attention_reward_scale": "accuracy"}


def test_the_pages_of_methods_are_what_the_script_makes_of_the_recipes():
    pages = runpy.run_path(str(ROOT / "docs" / "recipes_table.py"))["pages"]()
    for file, made in pages.items():
        assert made == file.read_text(encoding="utf-8"), "python docs/recipes_table.py"
    index = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[`(\w+)`\]", index, re.MULTILINE) == recipe_names(), "each on one page"


def test_a_recipe_without_about_is_named(monkeypatch):
    pages = runpy.run_path(str(ROOT / "docs" / "recipes_table.py"))["pages"]
    monkeypatch.setitem(pages.__globals__, "read_recipe", lambda name: replace(read_recipe(name), about=None))
    with pytest.raises(SystemExit, match=r"src/vgr_trl/recipes/\w+\.yaml lacks about"):
        pages()


def accuracy_reward(completions, **columns):
    """In place of right answers, which a random model does not give: many values, so that every group varies."""
    return [sum(map(ord, completion[0]["content"])) % 7 / 7 for completion in completions]


def failures_reward(completions, **columns):
    return [reward - 1 for reward in accuracy_reward(completions)]


failures_reward.__name__ = "accuracy_reward"


def with_tools(model_folder, folder):
    if Version(trl.__version__) < Version("1.16"):
        pytest.skip("the calls of tools are parsed otherwise")
    from support.tool_runs import tool_processor  # needs that TRL

    shutil.copytree(model_folder, folder)
    tool_processor(model_folder).save_pretrained(folder)
    return folder


def with_boxes_and_hints(question_files, file):
    rows = pandas.read_parquet(train_file(question_files))
    rows.assign(bbox=[[0.0, 0.0, 0.5, 1.0]] * len(rows), privileged_context="the shape is red").to_parquet(file)
    return f"train={file}"


@pytest.mark.parametrize("name", recipe_names())
def test_a_step_in_as_many_passes_as_the_recipe_says(
    name, model_folder, question_files, tmp_path, monkeypatch, passes, capsys
):
    recipe = read_recipe(name)
    reward = failures_reward if "distil_failed_only" in recipe.options else accuracy_reward
    monkeypatch.setitem(reward_registry._own, "accuracy", reward)
    if "environment" in recipe.options:
        monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        model_folder = with_tools(model_folder, tmp_path / "model")
    if "teacher_view" in recipe.options:
        question_files = with_boxes_and_hints(question_files, tmp_path / "boxes.parquet")
    flags = f"--recipe {name} --model_name_or_path {model_folder} --data_files {question_files} {TINY}"
    flags += f" --output_dir {tmp_path / 'run'} --system_prompt_file none"
    flags += "".join(f" --{name} {value}" for name, value in SMALLER.items() if name in recipe.options)
    assert main(["train", *flags.split()]) == 0
    assert re.search(rf"^ ?recipe +{name} *$", capsys.readouterr().out, re.MULTILINE)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"] == name
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["grad_norm"] > 0
    for signal in recipe.about.signals:
        assert any(math.isfinite(history[0][metric]) for metric in history[0].keys() & LEFT[signal]), signal
    before, after = (load_file(folder / "model.safetensors") for folder in (model_folder, tmp_path / "run"))
    assert any(not torch.equal(before[weight], after[weight]) for weight in before)
    rows = [sum(rows for graded, rows in passes if graded == trains) for trains in (False, True)]
    assert [count / ROWS for count in rows] == list(recipe.about.passes)
