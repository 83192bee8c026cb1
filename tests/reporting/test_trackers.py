"""What reaches the trackers through `report_to`, read back from where they keep it."""

import json
import subprocess
import sys
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from support.launching import environment
from support.trainers import config, vision_trainer

from vgr_trl.demo.demo import draw_questions
from vgr_trl.patches import as_text, in_texts

TRACKERS = tuple(name for name in ("tensorboard", "trackio") if find_spec(name))
OURS = {"vgr", "aei_vision", "aei_instruction"}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not TRACKERS:
        pytest.skip("neither tensorboard nor trackio is installed")
    folder = tmp_path_factory.mktemp("trackers")
    worker = Path(__file__).with_name("trackers_worker.py")
    command = [sys.executable, str(worker), str(folder), *TRACKERS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(TRACKIO_DIR=str(folder / "trackio")))
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "held.json").read_text())


def expected(held: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Name -> step -> value of what the trainer has logged, under the names that trackers give it."""
    values: dict[str, dict[int, float]] = {}
    for entry in held["logs"]:
        for name, value in entry.items():
            if name != "step" and isinstance(value, (int, float)):
                called = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                values.setdefault(called, {})[entry["step"]] = value
    return values


@pytest.mark.skipif("tensorboard" not in TRACKERS, reason="tensorboard is not installed")
def test_every_metric_reaches_tensorboard(held: dict[str, Any]) -> None:
    found = {name: dict(values) for name, values in held["tensorboard"].items()}
    assert {"train/attention/late/vgr", "eval/rewards/vgr_reward/mean", "train/perf/tokens_per_second"} <= set(found)
    for name, values in expected(held).items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.skipif("trackio" not in TRACKERS, reason="trackio is not installed")
def test_every_metric_reaches_trackio(held: dict[str, Any]) -> None:
    found: dict[str, dict[int, float]] = {}
    for entry in held["trackio"]:
        for name, value in entry.items():
            if name.startswith(("train/", "eval/")) and "train/global_step" in entry:
                found.setdefault(name, {})[int(entry["train/global_step"])] = value
    for name, values in expected(held).items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.skipif("trackio" not in TRACKERS, reason="trackio is not installed")
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


def test_conversations_are_texts_while_a_table_is_made_and_stay_as_they_are() -> None:
    image = Image.new("RGB", (2, 2))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what "}, {"type": "text", "text": "is it?"}]
    one, two = {"role": "system", "content": "answer"}, {"role": "user", "content": parts}
    prompts = deque([[two], [one, two], "a plain prompt"], maxlen=3)
    columns: dict[str, Any] = {"prompt": prompts, "completion": deque(), "advantages": [1.0]}
    with in_texts(columns):
        texts = ["<image>what is it?", "system: answer\n\nuser: <image>what is it?", "a plain prompt"]
        assert columns == {"prompt": texts, "completion": [], "advantages": [1.0]}
    assert columns["prompt"] is prompts
    assert list(prompts) == [[two], [one, two], "a plain prompt"]
    assert two["content"] is parts


def test_parts_of_other_kinds_and_calls_of_tools_are_named() -> None:
    content = [{"type": "video", "video": "x.mp4"}, "bare"]
    assert as_text([{"role": "user", "content": content}]) == "<video>bare"
    calls = [{"role": "assistant", "content": None, "tool_calls": ["look"]}, {"role": "tool", "content": "seen"}]
    assert as_text(calls) == "assistant:  ['look']\n\ntool: seen"
