"""Configurations of EasyR1, MTRL, VPPO and verl; expected values follow from their documentation and code by hand."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from vgr_trl.cli.arguments import DataArguments, RewardArguments
from vgr_trl.config_converters import EASYR1_KEYS, convert, flatten, read_configuration
from vgr_trl.config_converters.key_tables import MTRL_NAMES, VERL_DEFAULTS, VERL_KEYS, VERL_RENAMED_KEYS, load_flags
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.credit import OPTION_ALIASES
from vgr_trl.recipes import parse_yaml

EASYR1 = Path(__file__).with_name("easyr1_keys.txt").read_text().splitlines()[1:]
BY_HAND = yaml.safe_load(Path(__file__).with_name("easyr1_options.yaml").read_text())
ENOUGH, VERL = BY_HAND["enough"], BY_HAND["verl"]


def options_of(given=(), processes=1):
    found = convert({**ENOUGH, **dict(given)}, processes)
    assert (found.unsupported, found.refused) == ({}, {})
    assert set(found.options) <= {
        option.name for group in (DAPOConfig, DataArguments, RewardArguments, ModelConfig) for option in fields(group)
    }
    return found.options


def test_every_key_of_easyr1_is_known():
    assert len(EASYR1) == 193
    assert set(EASYR1) <= set(EASYR1_KEYS)
    assert set(MTRL_NAMES.values()) <= set(EASYR1_KEYS)
    assert {key for key, _ in VERL_RENAMED_KEYS.values()} | set(VERL_DEFAULTS) <= set(EASYR1_KEYS)
    for name, option in OPTION_ALIASES.items():  # of the plug-in inside EasyR1
        assert EASYR1_KEYS[f"algorithm.{name}"].option == option


def test_an_option_gets_the_value_of_its_key():
    for key, known in EASYR1_KEYS.items():
        if known.option and known.condition is None:
            default = known.default
            value = not default if isinstance(default, bool) else 3 if isinstance(default, int | float) else "x"
            assert options_of({key: value})[known.option] == value, key


@pytest.mark.parametrize("tables", [EASYR1_KEYS, VERL_KEYS])
def test_fixed_keys_stop_at_other_values_and_ignored_keys_at_none(tables):
    enough = ENOUGH if tables is EASYR1_KEYS else VERL
    for key, known in tables.items():
        if known.why:
            found = convert({**enough, key: "another"})
            assert (key in found.unsupported) == (known.accepted is not None), key
            assert all(key not in convert({**enough, key: value}).unsupported for value in known.accepted or [None])


@pytest.mark.parametrize("case", BY_HAND["cases"], ids=lambda case: str(case["given"]))
def test_options_by_hand(case):
    copied = {
        known.option: known.default for known in EASYR1_KEYS.values() if known.option and known.default is not None
        and known.condition in (None, "kl", "clipping", "warmup by ratio")
    }  # fmt: skip
    expected = {**BY_HAND["defaults"], **copied, **case["changed"]}
    found = options_of(case["given"], case.get("processes", 1))
    assert found == {name: value for name, value in expected.items() if value is not None}


@pytest.mark.parametrize(
    ("kind", "given"), [(kind, given) for kind in ("refused", "unsupported") for given in BY_HAND[kind]]
)
def test_values_that_cannot_be_followed_are_named(kind, given):
    found, key = convert({**ENOUGH, **given}), next(iter(given))
    found.files.clear()
    assert list(getattr(found, kind)) == [key]
    assert any(name == key and value.startswith("stops") for name, _, value in found.table_rows())
    with pytest.raises(ConfigError):
        found.check(["--ignore_unknown_keys"] if kind == "refused" else [])
    if kind == "unsupported":
        found.check(["--ignore_unknown_keys"])
    elif not key.startswith("data."):
        found.check([], is_evaluation=True)


@pytest.mark.parametrize("given", BY_HAND["wrong"])
def test_values_that_are_wrong_in_easyr1_too(given):
    processes = given.pop("processes", 1)
    with pytest.raises(ConfigError):
        convert({**ENOUGH, **given}, processes)


def test_mtrl():
    """One update a rollout; the divergence in the rewards, as use_divergence_loss is off by default."""
    table = yaml.safe_load(Path(__file__).with_name("mtrl.yaml").read_text(encoding="utf-8"))
    found = convert(flatten(table["given"]))
    assert (found.unsupported, found.refused) == ({}, {})
    assert found.options == found.options | table["expected"]


def test_messages_name_keys_as_the_file_does():
    mtrl = {"dataset.train_files": "hub/a", **{key: value for key, value in ENOUGH.items() if key[:4] != "data"}}
    with pytest.raises(ConfigError, match=r"^dataset.rollout_batch_size"):
        convert({**mtrl, "worker.actor.global_batch_size": 300})
    (why,) = convert({**mtrl, "dataset.rollout_batch_sise": 1}).unsupported.values()
    assert "dataset.rollout_batch_size" in why
    assert convert(mtrl).name("algorithm.adv_estimator") == "optimization.advantage_estimator"
    assert convert(ENOUGH).name("algorithm.adv_estimator") == "algorithm.adv_estimator"
    assert convert(VERL).name("worker.reward.reward_function") == "custom_reward_function.path"


def test_all_files_and_keys_that_are_missing_are_named_at_once():
    given = {"data.format_prompt": "no.jinja", "worker.reward.reward_function": "no.py:score", "trainer.no_key": 1}
    with pytest.raises(ConfigError) as raised:
        convert({**ENOUGH, **given, "worker.actor.model.model_path": None}).check([])
    assert all(word in str(raised.value) for word in ("no.jinja", "no.py", "no_key", "model_path"))
    found = convert({**ENOUGH, "worker.reward.reward_type": "model"})
    assert found.files.get("worker.reward.reward_function") is None
    with pytest.raises(ConfigError, match="--reward_model_name_or_path"):
        found.check([])
    found.check(["--reward_model_name_or_path"])


def test_flags_of_other_trainers():
    """None is a flag here, except a value of another meaning, and every flag that takes its place is one."""
    groups = DAPOConfig, DataArguments, RewardArguments, ModelConfig
    known = {option.name for group in groups for option in fields(group)}
    theirs = load_flags()
    assert {flag for table in theirs.values() for flag in table} & known == {"deepspeed"}
    ours = {name for table in theirs.values() for here in table.values() for name in re.findall(r"--(\w+)", here)}
    assert ours <= known | {"config_file"}
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "migration_tables.py"))
    assert page["make_page"]() == page["PAGE"].read_text(encoding="utf-8"), "python docs/migration_tables.py"


def test_a_reward_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, name in (("def reward_function(x): ...", "reward_function"), ("def main(x): ...\ndef f(): ...", "main")):
        (tmp_path / "mine.py").write_text(text)
        assert options_of({"worker.reward.reward_function": "mine.py"})["reward_funcs"] == [f"mine.py:{name}"]


def test_a_default_that_nobody_wrote_stops_nothing(monkeypatch):
    """Theirs: 256 prompts an update for a critic, 4 completions a pass, vLLM on 2 GPUs, and wandb."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    enough = {key: value for key, value in ENOUGH.items() if key not in ("worker.rollout.name", "trainer.logger")}
    given = {**enough, "worker.actor.global_batch_size": 2, "worker.actor.ppo_epochs": 2, "worker.rollout.n": 3}
    found = convert({**given, "algorithm.adv_estimator": "gae", "worker.actor.optim.weight_decay": 0.1})
    options = found.options
    assert (found.refused, found.unsupported) == ({}, {})
    assert (options["per_device_train_batch_size"], options["gradient_accumulation_steps"]) == (3, 2)
    assert (options["use_vllm"], options["report_to"]) == (False, ["none"])
    assert options_of({"worker.actor.global_batch_size": 64}, 4)["vllm_tensor_parallel_size"] == 2


def test_the_newest_checkpoint_of_a_folder_is_continued(tmp_path):
    load, find = "trainer.load_checkpoint_path", "trainer.find_last_checkpoint"
    folder, theirs = tmp_path / "experiment", tmp_path / "theirs"

    def resumed(path=folder, **given):
        path = given.get(load, str(path))
        found = convert({**ENOUGH, load: path, **given})
        if path is None or Path(found.checkpoint or "no folder").is_dir():
            assert found.evaluation_options()["model_name_or_path"] == (found.checkpoint or "some/model")
        else:
            with pytest.raises(ConfigError):
                found.evaluation_options()
        assert bool(found.notes) == (found.options.get("resume_from_checkpoint") == "none")
        return found.options.get("resume_from_checkpoint")

    assert resumed() == str(folder)  # which is refused where it is read
    assert resumed(**{find: True}) == "none"
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "run.json").touch()
    assert resumed(**{find: True}) == "none"
    assert resumed(**{find: True, "trainer.save_checkpoint_path": str(folder)}) == "latest"
    assert resumed(**{load: None, "trainer.save_checkpoint_path": str(folder)}) == "latest"
    assert resumed(**{load: None, "trainer.save_checkpoint_path": str(tmp_path)}) is None
    for name in ("checkpoint-9", "checkpoint-10"):
        (folder / name).mkdir()
        (folder / name / "manifest.json").touch()
    assert resumed() == resumed(**{find: True}) == str(folder / "checkpoint-10")
    assert resumed(**{find: False}) == str(folder)
    (theirs / "actor").mkdir(parents=True)
    assert resumed(theirs) == str(theirs)


def test_references_are_resolved_after_overrides(tmp_path, monkeypatch):
    pytest.importorskip("omegaconf")
    file = tmp_path / "config.yaml"
    sizes = "worker: {actor: {global_batch_size: 8}}\ndata: {rollout_batch_size: '${worker.actor.global_batch_size}'}"
    file.write_text(sizes)
    argv = [
        "--config", str(file), "worker.actor.global_batch_size=4", "trainer.experiment_name=x_${oc.env:SLURM_JOB_ID}",
    ]  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found, _ = read_configuration(argv)
    assert found == {
        "worker.actor.global_batch_size": 4, "data.rollout_batch_size": 4, "trainer.experiment_name": "x_7"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be resolved .*Interpolation key 'data.nothing' not found"):
        read_configuration([*argv, "data.seed=${data.nothing}"])
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    for reference in ("${oc.env:WANDB_API_KEY}", "${oc.env:${trainer.k}}", "${oc.decode:'${oc.env:WANDB_API_KEY}'}"):
        with pytest.raises(ConfigError, match="oc.env:WANDB_API_KEY is none of the variables that launchers set"):
            read_configuration([*argv, "trainer.k=WANDB_API_KEY", f"trainer.project_name={reference}"])


@pytest.mark.parametrize("pair", ["[*{0}, *{0}]", "{{a: *{0}, b: *{0}}}", "{{<<: [*{0}, *{0}]}}"])
def test_aliases_that_repeat_without_end_are_refused(pair):
    lines = [f"x{n}: &x{n} {pair.format(f'x{n - 1}')}" for n in range(1, 25)]
    with pytest.raises(yaml.YAMLError, match="aliases repeat"):
        parse_yaml("\n".join(["x0: &x0 {trainer: 1}", *lines]))
    with pytest.raises(yaml.YAMLError, match="aliases repeat"):
        parse_yaml("x: &x [*x]")
    assert parse_yaml("x: &x {a: 1}\ny: {<<: *x}") == {"x": {"a": 1}, "y": {"a": 1}}


@pytest.mark.parametrize("case", BY_HAND["cases of verl"], ids=lambda case: str(case["given"])[:70])
def test_verl_names_with_verl_defaults(case):
    found = convert({**VERL, **case["given"]})
    assert found.refused == {}
    assert list(found.unsupported) == ["worker.reward.reward_function", *case.get("unknown", [])]
    assert found.options == found.options | case.get("expected", {})
    assert not set(case.get("unset", [])) & set(found.options)
    names, options, _ = zip(*found.table_rows(), strict=True)
    printed = {*names}
    assert printed >= {*VERL, *case["given"]}
    assert {*options} >= {*case.get("expected", {})}
    assert not [name for name in printed if name.startswith("worker.")]
    assert printed.isdisjoint({"algorithm.online_filtering*", "trainer.save_model_only*", "data.video_fps*"})
