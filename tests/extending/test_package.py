import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.made_sets import jsonl
from support.trainers import logged

from vgr_trl import registries
from vgr_trl.cli.__main__ import main
from vgr_trl.config import CreditOptions
from vgr_trl.credit import shape_advantages
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.load import load_split
from vgr_trl.errors import ConfigError, DataError, RewardError
from vgr_trl.rewards import load_reward
from vgr_trl.signals.named import RolloutSignals, add_named, named_signals
from vgr_trl.signals.perturbation import perturb_images
from vgr_trl.signals.ratios import AttentionMass

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """A folder that the package has been installed into, with its entry points."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for language, name in (("python", "sight_methods.py"), ("toml", "pyproject.toml")):
        blocks = re.findall(rf"^```{language}\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        (source / name).write_text("\n\n".join(blocks))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile",
         "--no-index", "--disable-pip-version-check", "--target", target, source],
        check=True,
    )  # fmt: skip
    return target


@pytest.fixture
def installed(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package))
    yield package
    sys.modules.pop("sight_methods", None)


def measured():
    """Two completions of 3 and 2 tokens; attention on the image 0.1, 0.2, 0.3 in one layer, thrice that in another."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    once = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.1, 0.9]])
    ones = torch.ones(2, dtype=torch.long)
    mass = AttentionMass(torch.stack([once, 3 * once]), torch.stack([once, once]), ones, ones, mask)
    return RolloutSignals(torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.5], [1.0, 2.0, 9.0]]), mask, mass)


def test_a_rule_reads_a_signal_by_its_name(installed):
    """Mean attention 0.2, 0.4, 0.6 and 0.6, 0.2 times entropies: 0.2, 0.4, 0.3 and 0.6, 0.4, with means 0.3 and 0.5.

    The second token is above in the first completion, the first in the second: 2 of 5 tokens get 1 + 2.
    """
    chosen = CreditOptions(credit_rules=["focus"], plugin_options={"focus_strength": 2.0})
    signals = measured()
    with pytest.raises(ConfigError):
        shape_advantages(torch.ones(2), signals, chosen)
    assert add_named(named_signals(chosen), signals) == ["doubtful_looks"]
    assert signals.extra["doubtful_looks"][0].tolist() == pytest.approx([0.2, 0.4, 0.3])
    shaped, metrics = shape_advantages(torch.tensor([1.0, -1.0]), signals, chosen)
    assert shaped.tolist() == [[1, 3, 1], [-3, -1, -1]]
    assert metrics["credit/focus/above"] == pytest.approx(2 / 5)
    assert metrics["credit/focus/weight_mean"] == pytest.approx(9 / 5)


def test_what_a_rule_must_not_return(monkeypatch):
    for returned in (torch.ones(2, 3), (torch.ones(2, 2), {}), (torch.full((2, 3), math.nan), {})):
        monkeypatch.setitem(registries.credit_rules._own, "odd", lambda *given, returned=returned: returned)
        with pytest.raises(DataError):
            shape_advantages(torch.ones(2), measured(), CreditOptions(credit_rules=["odd"]))


def test_a_signal_made_of_itself(monkeypatch):
    for name, other in (("hen", "egg"), ("egg", "hen")):
        signal = registries.declares(needs=(other,))(lambda signals, options: signals.logps)
        monkeypatch.setitem(registries.signals._own, name, signal)
    with pytest.raises(ConfigError):
        DAPOConfig("out", use_cpu=True, signals=["hen"])


def test_a_name_that_two_packages_register(installed, monkeypatch):
    monkeypatch.setitem(registries.rewards._own, "brevity", len)
    with pytest.raises(RewardError):
        load_reward("brevity")
    with pytest.raises(RewardError):
        registries.rewards.register("brevity")(max)


def test_a_perturbation_and_its_option(installed):
    image = Image.new("L", (2, 2))
    image.putpixel((0, 0), 255)
    for given, place in (({}, (1, 0)), ('{"mirror_upside_down": true}', (0, 1))):
        config = DAPOConfig("out", use_cpu=True, perturbation="mirror", plugin_options=given)
        (found,) = perturb_images([image], "mirror", config.parameters_of("mirror"), seed=0, step=0, index=0)
        assert found.getpixel(place) == 255


def test_options_of_a_reward(installed):
    """n / (n + words): 1 / 4 of three words, and 5 / 8 by the default."""
    three = {"completions": ["a b c"]}
    for spec in ("brevity", f"{installed}/sight_methods.py:brevity"):
        assert load_reward(spec)(**three) == [5 / 8]
        assert load_reward(spec, options={"brevity_words": 1})(**three) == [1 / 4]
    with pytest.raises(RewardError):
        load_reward("brevity", options={"brevity_word": 1})
    with pytest.raises(ConfigError):
        DAPOConfig("out", use_cpu=True, credit_rules=["focus"], plugin_options={"brevity_words": 1})


def test_training_with_everything(installed, model_folder, question_files, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "credit_rules: [focus, trajectory_scale, curiosity]\nplugin_options: {focus_strength: 3.0}\n"
        "signals: [doubtful_looks, dependency]\n"
    )
    flags = (
        f"--config {file} --model_name_or_path {model_folder} --data_files {question_files} "
        "--perturbation mirror --teacher_view halves --max_steps 1 --max_completion_length 6 --num_generations 4 "
        "--eval_strategy no --per_device_train_batch_size 8 --logging_steps 1 --save_strategy no --report_to none "
        f"--use_cpu --bf16 false --output_dir {tmp_path / 'out'} --rollout_log_steps 0 --temperature 1.5 "
        '--reward_funcs brevity --reward_function_kwargs {"brevity_words":1} --loss_terms image_gain'
    )
    assert main(["train", *flags.split()]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    logged = next(entry for entry in state["log_history"] if "signals/doubtful_looks" in entry)
    assert logged["signals/doubtful_looks"] > 0
    assert math.isfinite(logged["image_gain"])
    assert logged["signals/dependency"] >= 0
    assert logged["credit/focus/weight_max"] == pytest.approx(4)
    assert logged["credit/curiosity/added"] > 0
    assert (logged["views/teacher/rows"], abs(logged["signals/teacher_gap"]) > 0) == (1, True)
    assert logged["scaling_factor_mean"] == pytest.approx(1, abs=1e-5)
    assert 0 < logged["rewards/brevity/mean"] <= 1


def test_a_rule_that_reads_nothing_but_tokens(vision_trainer, monkeypatch):
    """No pass measures anything, the rule still gets a mask (N, T), and the tokens that the advantages belong to."""
    seen = []

    def even_ids(advantages, signals, mask, options, *, completion_ids):
        seen.append((signals.logps, completion_ids, mask))
        return completion_ids % 2 == 0, {}

    monkeypatch.setitem(registries.credit_rules._own, "even_ids", even_ids)
    trainer = vision_trainer(max_steps=1, credit_rules=["even_ids"], compute_attention_metrics=False)
    trainer.train()
    ((logps, ids, mask),) = seen
    assert logps.isnan().all()
    assert ids.shape == mask.shape == (8, 6)
    shares = (mask & (ids % 2 == 0)).sum() / mask.sum()
    assert logged(trainer, "credit/even_ids/token_fraction") == [pytest.approx(float(shares))]


@pytest.mark.parametrize("kind", ["credit_rules", "signals", "loss_terms"])
def test_a_signal_that_is_not_declared_is_named_as_a_need(vision_trainer, monkeypatch, kind):
    functions = {
        "credit_rules": lambda advantages, signals, mask, options: (signals.attention.vision.mean(0), {}),
        "signals": lambda signals, options: signals.dependency * 2,
        "loss_terms": lambda passed, options: passed.logps - passed.perturbed_logps,
    }
    monkeypatch.setitem(getattr(registries, kind)._own, "mine", functions[kind])
    further = {"credit_rules": ["mine"]} if kind == "credit_rules" else {kind: ["mine"], "token_weights": True}
    options = {} if "token_weights" in further else {"compute_attention_metrics": False}
    with pytest.raises(ConfigError, match="needs"):
        vision_trainer(max_steps=1, **further, **options).train()


def test_a_data_set_is_converted(installed, png, tmp_path):
    rows = jsonl(tmp_path / "riddles.jsonl", [{"riddle": "What?", "answer": "red", "picture": str(png)}])
    out = tmp_path / "out"
    assert main(f"data convert riddles --data_files {rows} --output_dir {out} --workers 0".split()) == 0
    assert load_split("train", dataset_path=str(out))["solution"] == ["red"]
