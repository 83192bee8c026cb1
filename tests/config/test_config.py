import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig, TrlParser

from vgr_trl import registries
from vgr_trl.cli.train import describe_run
from vgr_trl.dapo_config import SEGMENTED, SPELLINGS, DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.options import changed_options, unused_options

TABLE = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[2] / "docs"
ORIGINS = (DOCS / "migration.md", DOCS / "../experiments/README.md")


def config(tmp_path: Path, **options: object) -> DAPOConfig:
    defaults = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 8}
    return DAPOConfig(**{"output_dir": str(tmp_path), **defaults, **options})


@pytest.mark.parametrize(("name", "value"), TABLE["outside"].items())
def test_numbers_of_trl_are_checked_as_ours_are(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        config(tmp_path, **{name: value})


@pytest.mark.parametrize("options", TABLE["refused"], ids=str)
def test_combinations_that_are_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        config(tmp_path, **options)


@pytest.mark.parametrize(("options", "named"), TABLE["refused in a run"], ids=str)
def test_options_that_a_run_cannot_follow_are_refused(options, named, vision_trainer):
    with pytest.raises(ConfigError, match=named):
        vision_trainer(**options)


@pytest.mark.parametrize(("given", "expected"), TABLE["without effect"], ids=str)
def test_options_without_effect(tmp_path, given, expected):
    absent = given.pop("absent", ())
    assert set(unused_options(config(tmp_path, **given), absent)) == set(expected)


def test_the_trainer_names_options_without_effect_and_the_plan_does_not_show_them_as_on(text_trainer, monkeypatch):
    warnings = []
    monkeypatch.setattr("vgr_trl.validate.features.logger.warning", warnings.append)
    trainer = text_trainer(filter_low=0.1, replay_buffer_size=8, soft_punish_cache=3, max_steps=1, check_pixels=True)
    assert "filter_low has no effect: online_filtering is False." in warnings
    assert "soft_punish_cache has no effect: there is no length reward." in warnings
    plan = describe_run(trainer, "here", None, verbose=True)
    assert ("changed", "replay_buffer_size=8") in plan
    assert ("without effect", "filter_low=0.1: online_filtering is False") in plan
    assert "token_weights_clip" not in changed_options(trainer.args)


def test_flags_and_a_file_as_users_write_them(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("warmup_ratio: 0.1\nuse_cpu: true\nbf16: false\nearly_reward_weights: [1.0, 2.0]\n")
    flags = f"--config {file} --warmup_ratio 0.2 --output_dir {tmp_path} --reward_weights 2.5 1.0"
    flags += " --soft_punish_cache 50 --num_generations_eval 4 --share_prompts on --resume_from_checkpoint"
    (made,) = TrlParser(DAPOConfig).parse_args_and_config(flags.split())
    assert (made.warmup_steps, made.early_reward_weights, made.reward_weights) == (0.2, [1.0, 2.0], [2.5, 1.0])
    assert (made.soft_punish_cache, made.num_generations_eval, made.share_prompts) == (50, 4, "on")
    assert made.resume_from_checkpoint == "latest"


def test_the_pages_are_in_step_with_the_options():
    script = runpy.run_path(str(DOCS / "options_table.py"))
    assert script["page"]() == (DOCS / "options.md").read_text(encoding="utf-8"), "python docs/options_table.py"
    known = {each.name for group in (*script["GROUPS"], ModelConfig) for each in fields(group)}
    text = "".join(page.read_text(encoding="utf-8") for page in ORIGINS)
    named = {name for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for name in re.findall(r"`--(\w+)", row)}
    assert len(named) > 30
    assert named <= known | SPELLINGS.keys() | {SEGMENTED}


def test_every_reward_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \| `\w+` \|", (DOCS / "rewards.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = registries.rewards.names()
    assert set(rows) <= set(names)
    described = [registries.rewards.load(row) for row in rows]
    assert [name for name in names if registries.rewards.load(name) not in described] == []
