"""What reaches the trackers through `report_to`, read back from where they keep it."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from support.launching import environment
from support.trainers import config, vision_trainer

from vgr_trl.demo.demo import draw_questions

OURS = {"vgr", "aei_vision", "aei_instruction"}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("trackio")
    folder = tmp_path_factory.mktemp("trackers")
    command = [sys.executable, str(Path(__file__).with_name("trackers_worker.py")), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(TRACKIO_DIR=str(folder / "trackio")))
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "held.json").read_text())


def test_every_metric_reaches_trackio(held: dict[str, Any]) -> None:
    found: dict[str, dict[int, float]] = {}
    for entry in held["trackio"]:
        for name, value in entry.items():
            if name.startswith(("train/", "eval/")) and "train/global_step" in entry:
                found.setdefault(name, {})[int(entry["train/global_step"])] = value
    expected: dict[str, dict[int, float]] = {}
    for entry in held["logs"]:
        for name, value in entry.items():
            if name != "step" and isinstance(value, (int, float)):
                called = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                expected.setdefault(called, {})[entry["step"]] = value
    assert {"train/attention/late/vgr", "eval/rewards/vgr_reward/mean", "train/perf/tokens_per_second"} <= set(found)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


def test_the_table_of_completions_reaches_trackio_with_our_columns(held: dict[str, Any]) -> None:
    tables = [entry["completions"]["_value"] for entry in held["trackio"] if "completions" in entry]
    assert len(tables) == 4  # two steps, an evaluation, and the end of the training
    for table in tables:
        for row in table:
            assert {*OURS, "prompt", "completion", "accuracy_reward", "vgr_reward", "advantage", "image"} <= set(row)
            assert row["prompt"].startswith("<image>")
            assert isinstance(row["completion"], str)
            assert row["vgr"] > 0


@pytest.fixture
def table(model_folder: Path, tmp_path: Path) -> pd.DataFrame:
    """The table of a step whose batch has prompts with an image and prompts without."""
    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": Value("string")}),
            "images": List(ImageFeature()),
            "solution": Value("string"),
        }
    )
    questions = draw_questions(2, seed=0, split="train", multiple_choice=False)
    rows = [
        {"prompt": [{"role": "user", "content": row["problem"]}], "images": images, "solution": row["solution"]}
        for row, images in zip(questions, ([questions[0]["image"]], []), strict=True)
    ]

    def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(sum(ids) % 5) for ids in completion_ids]

    options = config(
        tmp_path, per_device_train_batch_size=4, num_generations=2, max_completion_length=4, max_steps=1,
        log_completions=True, num_completions_to_print=0,
    )  # fmt: skip
    vision_trainer(model_folder, length_reward, options, Dataset.from_list(rows, features=features)).train()
    return pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")


def test_a_table_holds_prompts_with_and_without_images(table: pd.DataFrame) -> None:
    assert set(table.columns) >= OURS
    with_image = [prompt.startswith("<image>which ") for prompt in table["prompt"]]
    assert sum(with_image) == 2
    assert [prompt.startswith("which ") for prompt in table["prompt"]] == [not seen for seen in with_image]
    assert len(with_image) == 4
    assert all(isinstance(completion, str) for completion in table["completion"])
    assert table["vgr"].isna().tolist() == [not seen for seen in with_image]
    if find_spec("wandb"):
        import wandb

        assert len(wandb.Table(dataframe=table).data) == 4
