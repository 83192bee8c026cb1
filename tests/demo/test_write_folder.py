"""The embedded model as files: what is written loads, and says something worth comparing."""

import pytest
from datasets import load_dataset

from vgr_trl.cli.evaluate import load_for_inference
from vgr_trl.demo.write_folder import write_folder
from vgr_trl.evaluation import evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "some" / "embedded"
    write_folder(folder, train=64, test=8)
    return folder


def test_questions_and_prompt_are_there_and_nothing_else(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"model", "train.parquet", "test.parquet", "no_system_prompt.txt"}
    assert [path.name for path in folder.parent.iterdir()] == ["embedded"]
    files = {split: str(folder / f"{split}.parquet") for split in ("train", "test")}
    rows = load_dataset("parquet", data_files=files)
    assert {split: len(rows[split]) for split in rows} == {"train": 64, "test": 8}
    assert rows["train"][0]["image"].size == (56, 56)
    assert not set(rows["train"]["id"]) & set(rows["test"]["id"])


def test_the_model_writes_answers_and_some_are_right(folder):
    """So that rewards differ within groups from the first step."""
    model, processor = load_for_inference(str(folder / "model"))
    rows = list(load_dataset("parquet", data_files=str(folder / "train.parquet"), split="train"))
    found = evaluate(
        model, processor, rows, num_samples=4, system_prompt=None, max_completion_length=16, progress=False
    )
    assert found.format_sampled > 0.3
    assert 0.02 < found.mean_at_k < 0.6
