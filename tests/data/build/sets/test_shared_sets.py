"""The two published sets that lie beside the project, where they do."""

import io
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image
from support.made_sets import rows_in, skipped_in

from vgr_trl.cli.__main__ import main
from vgr_trl.data.load import load_split
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read import Source
from vgr_trl.data.rows import prepare_rows

DATA = Path(__file__).parents[5] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")


def convert(name, split, folder, *flags) -> None:
    where = ["--dataset_path", str(DATA / name), "--split", split, "--output_dir", str(folder), "--workers", "0"]
    assert main(["data", "convert", name, *where, *flags]) == 0


def test_every_question_is_read():
    """Counts of the files themselves; the README of the sets gives 48,248 questions of easy-VQA."""
    sources = [Source(dataset_path=str(DATA / "easy_vqa"), split=split) for split in ("train", "test")]
    found = [item for source in sources for _, item in CONVERTERS["easy_vqa"].read(source)]
    assert not [item for item in found if isinstance(item, str)]
    assert len(found) == 48_248
    assert len({item.id for item in found}) == 48_248
    assert len({item.solution for item in found}) == 13
    for split, count in (("train", 1000), ("dev", 989), ("test", 990)):
        nlvr = [item for _, item in CONVERTERS["nlvr"].read(Source(dataset_path=str(DATA / "nlvr"), split=split))]
        assert not [item for item in nlvr if isinstance(item, str)]
        assert len(nlvr) == count


def test_nlvr_becomes_rgb_and_keeps_its_labels(tmp_path):
    convert("nlvr", "dev", tmp_path / "out", "--subset_size", "60")
    (file,) = (DATA / "nlvr").rglob("*dev*.parquet")
    stored = {row["identifier"]: row for row in pyarrow.parquet.read_table(file).slice(0, 60).to_pylist()}
    rows = rows_in(tmp_path / "out", "validation")
    assert len(rows) == 60
    for row in rows:
        before = stored[row["id"]]
        assert row["problem"].endswith(before["sentence"].strip())
        assert row["choices"]["AB".index(row["solution"])] == str(before["label"]).lower()
        image = Image.open(io.BytesIO(row["image"]["bytes"]))
        assert (image.mode, image.size) == ("RGB", (400, 100))


def test_merged_questions_of_one_image_stay_on_one_side(tmp_path):
    convert("easy_vqa", "test", tmp_path / "easy", "--subset_size", "300")
    convert("nlvr", "dev", tmp_path / "nlvr", "--subset_size", "100")
    sets = [str(tmp_path / name) for name in ("easy", "nlvr")]
    assert main(["data", "merge", *sets, "--output_dir", str(tmp_path / "out"), "--workers", "0"]) == 0
    sides = {split: rows_in(tmp_path / "out", split) for split in ("train", "test")}
    images = {split: {row["image"]["bytes"] for row in rows} for split, rows in sides.items()}
    assert not images["train"] & images["test"]
    left = len(skipped_in(tmp_path / "out"))
    assert len(sides["train"]) + len(sides["test"]) == 400 - left
    assert len(sides["test"]) == pytest.approx((400 - left) / 10, abs=1)
    assert set(Counter(row["source"] for row in sides["train"])) == {"easy-VQA", "NLVR"}
    rows, skipped = prepare_rows(load_split("test", dataset_path=str(tmp_path / "out")), split="test")
    assert (len(rows), skipped) == (len(sides["test"]), [])
