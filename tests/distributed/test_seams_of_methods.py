"""Regions, similarity, views, noise and blind answers: the same for one process as for two with half of each group."""

import json
import math
from pathlib import Path

import pytest
import seams_worker
import torch
from seams_worker import CASES, run_all
from support.launching import launch
from support.trainers import train_file

DIFFERENT = (
    "perf/", "timing/", "step_time", "sharing/", "skipped/rows", "vision/", "grad_norm", "loss", "epoch", "clip_ratio",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(model_folder, question_files, tmp_path_factory):
    folder, file = tmp_path_factory.mktemp("seams"), train_file(question_files)
    moved, found = run_all(model_folder, file, folder / "one", 4)
    launch(Path(seams_worker.__file__), model_folder, file, folder, 2, processes=2)
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
    for reward, values in one[name]["rewards"].items():
        assert values == pytest.approx(two[name]["rewards"][reward], abs=1e-4, nan_ok=True), reward
    assert one[name]["extra"].get("blind_answers") == two[name]["extra"].get("blind_answers")
    for first, second in zip(one[name]["history"], two[name]["history"], strict=True):
        assert first.keys() == second.keys()
        for metric, value in first.items():
            if not metric.startswith(DIFFERENT) and isinstance(value, float) and not math.isnan(value):
                assert second[metric] == pytest.approx(value, rel=2e-3, abs=2e-4), metric


@pytest.mark.slow
def test_each_did_something(outcomes):
    (one, _), _ = outcomes
    seen = one["regions, similarity and views"]
    assert any(0 < entry["signals/region_share"] < 1 for entry in seen["history"])
    assert all(0 < entry["signals/stability"] < 1 for entry in seen["history"])
    assert len({round(value, 6) for value in seen["rewards"]["likeness_reward"]}) > 3
    noise = one["noise"]["history"]
    assert [entry["noisy/generations"] for entry in noise] == [1.0, 1.0, 1.0]
    assert len({entry["noisy/strength"] for entry in noise}) == 3
    assert all(entry["noisy/reward"] != entry["noisy/reward_clean"] for entry in noise[:1])
    assert set(one["blind answers"]["rewards"]["blind_accuracy_reward"]) == {0.0, 1.0}
