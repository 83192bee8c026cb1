"""Every stage gives the same training for one process as for two that hold half of each group."""

import json
import math
from pathlib import Path

import pytest
import stages_worker
import torch
from stages_worker import CASES, run_all
from support.launching import launch
from support.trainers import train_file

DIFFERENT = (
    "perf/", "timing/", "step_time", "sharing/", "skipped/rows", "vision/", "replay/megabytes", "grad_norm", "loss",
    "epoch", "clip_ratio",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(model_folder, question_files, tmp_path_factory):
    folder, file = tmp_path_factory.mktemp("stages"), train_file(question_files)
    moved, found = run_all(model_folder, file, folder / "one", 4)
    launch(Path(stages_worker.__file__), model_folder, file, folder, 2, processes=2)
    return [
        (json.loads(json.dumps(found)), moved),
        (json.loads((folder / "results.json").read_text()), torch.load(folder / "moves.pt")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_process_and_two_train_the_same(name, outcomes):
    (one, moves), (two, other_moves) = outcomes
    assert moves[name].abs().max() > 1e-4
    assert (moves[name] - other_moves[name]).abs().max() < 2e-4 * moves[name].abs().max()
    assert one[name]["rewards"].keys() == two[name]["rewards"].keys()
    for reward, values in one[name]["rewards"].items():
        assert values == pytest.approx(two[name]["rewards"][reward], abs=1e-4, nan_ok=True), reward
    assert one[name]["advantages"] == pytest.approx(two[name]["advantages"], abs=1e-3)
    assert one[name]["extra"].get("blind_answers") == two[name]["extra"].get("blind_answers")
    for first, second in zip(one[name]["history"], two[name]["history"], strict=True):
        assert first.keys() == second.keys()
        for metric, value in first.items():
            if not metric.startswith(DIFFERENT) and isinstance(value, float) and not math.isnan(value):
                assert second[metric] == pytest.approx(value, rel=2e-3, abs=2e-4), metric


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay", "replay without measuring", "replay and resample"])
def test_megabytes_of_the_buffer_are_those_of_all_processes(name, outcomes):
    """A group is as long as its own completions wherever it lies, so only token types of rows without images differ."""
    one, two = ([entry["replay/megabytes"] for entry in found[name]["history"]] for found, _ in outcomes)
    assert one[-1] > 0
    assert two == pytest.approx(one, rel=0.05)


@pytest.mark.slow
def test_old_logps_of_replayed_groups_are_the_same_from_a_scoring_pass_and_from_the_first_training_pass(outcomes):
    (_, moves), _ = outcomes
    difference = (moves["replay"] - moves["replay without measuring"]).abs().max()
    assert difference < 2e-4 * moves["replay"].abs().max()


@pytest.mark.slow
def test_the_stages_did_something(outcomes):
    (one, _), _ = outcomes
    signals = one["signals"]
    assert len(set(signals["rewards"]["vgr_reward"])) > 2
    assert set(signals["rewards"]["vgr_hard_negative_reward"]) - {0.0}
    assert {"vgr", "aei_vision", "aei_instruction"} <= set(signals["extra"])
    last = signals["history"][-1]
    assert last["token_weight_mean"] == pytest.approx(1, abs=1e-4)
    assert last["scaling_factor_mean"] == pytest.approx(1, abs=1e-4)
    assert 0.3 < last["combined_token_fraction"] < 1
    for name in ("replay", "replay without measuring"):
        assert max(entry["replay/replaced_fraction"] for entry in one[name]["history"]) > 0
    assert max(entry["dynamic_sampling/generated_groups"] for entry in one["resample"]["history"]) > 0
    for name in ("kl in the loss", "kl among the rewards"):
        coefficients = [entry["kl/coefficient"] for entry in one[name]["history"]]
        assert coefficients[0] == 0.5
        assert len(set(coefficients)) == 3
        assert one[name]["history"][-1]["kl/mean"] > 0
    for name in ("critic", "critic model"):
        assert one[name]["history"][0]["critic/value_mean"] == 0
        assert one[name]["history"][-1]["critic/value_mean"] != 0
    assert one["perception loss"]["history"][-1]["perception_loss"] < 0
    seen = one["regions, similarity and views"]
    assert any(0 < entry["signals/region_share"] < 1 for entry in seen["history"])
    assert all(0 < entry["signals/stability"] < 1 for entry in seen["history"])
    assert len({round(value, 6) for value in seen["rewards"]["likeness_reward"]}) > 3
    noise = one["noise"]["history"]
    assert [entry["noisy/generations"] for entry in noise] == [1.0, 1.0, 1.0]
    assert len({entry["noisy/strength"] for entry in noise}) == 3
    assert all(entry["noisy/reward"] != entry["noisy/reward_clean"] for entry in noise[:1])
    assert set(one["blind answers"]["rewards"]["blind_accuracy_reward"]) == {0.0, 1.0}
