"""Files, folders and the hub as `Source` reads them; damaged files give a sentence or a reason, never another row."""

import io
import re

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image
from support.made_sets import jsonl, parquet, picture, written

from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read import Source, read_files, splits_in
from vgr_trl.utils import DataError

ROWS = [{"prompt": f"q{number}", "answer": "a", "image": picture((number, 0, 0))} for number in range(40)]


def test_rows_come_in_order_with_their_places(tmp_path):
    paths = [parquet(tmp_path / "a.parquet", ROWS), tmp_path / "b.jsonl"]
    paths[1].write_text('\ufeff{"prompt": 1}\n\n{"prompt": 2}')
    found = list(read_files(paths))
    places = [(0, row) for row in range(40)] + [(1, 0), (1, 2)]
    assert [origin for origin, _ in found] == [Origin(str(paths[file]), row) for file, row in places]
    assert [row for _, row in found] == [*ROWS, {"prompt": 1}, {"prompt": 2}]


SINK = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), SINK, row_group_size=10)


def test_a_byte_that_changed_in_a_written_set_is_found(tmp_path):
    """Written sets carry checksums: a changed pixel would otherwise be a silent wrong row."""
    written(
        [(Origin("f", n), Question(f"q{n}", "s", "p", "x", [picture((n, 0, 0))])) for n in range(5)], tmp_path / "a"
    )
    (file,) = (tmp_path / "a").glob("*.parquet")
    assert len(list(read_files([file]))) == 5
    data = bytearray(file.read_bytes())
    place = data.index(picture((3, 0, 0))["bytes"])
    data[place + 40] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="cannot be read beyond row 0 .*: check that it is complete"):
        list(read_files([file]))


def files_of(source, config=None):
    return [row["file"] for _, row in source.records(config)]


def folder(tmp_path, *names):
    for name in names:
        jsonl(tmp_path / name, [{"file": name}])
    return str(tmp_path)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    path = folder(tmp_path, "b.jsonl", "sub/a.jsonl", "a.jsonl", ".hidden.jsonl", ".cache/x.jsonl", "skipped.jsonl")
    source = Source(dataset_path=path)
    assert files_of(source) == ["a.jsonl", "b.jsonl", "sub/a.jsonl"]
    before = source.identity()
    assert source.identity() == before
    jsonl(tmp_path / "a.jsonl", [{"a": 1}, {"a": 1}])
    assert source.identity() != before


def test_file_names_say_the_split(tmp_path):
    names = [f"data/train-0000{n}-of-00002.jsonl" for n in range(2)]
    path = folder(tmp_path, *names, "data/test.jsonl", "val.jsonl")
    assert files_of(Source(dataset_path=path)) == names
    assert files_of(Source(dataset_path=path, split="test")) == ["data/test.jsonl"]
    assert files_of(Source(dataset_path=path, split="dev")) == ["val.jsonl"]
    assert splits_in(tmp_path) == ["test", "train", "val"]
    with pytest.raises(DataError, match=re.escape("has the splits ['test', 'train', 'validation'], but not 'other'")):
        Source(dataset_path=path, split="other").records()


def test_a_configuration_is_a_folder_or_the_start_of_a_name(tmp_path):
    path = folder(tmp_path, "corpus/train.jsonl", "queries-train.jsonl", "queriesold.jsonl")
    source = Source(dataset_path=path)
    assert files_of(source, "corpus") == ["corpus/train.jsonl"]
    assert files_of(source, "queries") == ["queries-train.jsonl"]
    source = Source(data_files=[f"corpus={path}/corpus/train.jsonl", f"queries={path}/queriesold.jsonl"])
    assert files_of(source, "queries") == ["queriesold.jsonl"]
    with pytest.raises(DataError, match="names no qrels, which is needed too: give it as qrels=FILE"):
        source.records("qrels")


def test_sets_of_save_to_disk(tmp_path):
    rows = Dataset.from_dict({"image": [Image.new("RGB", (4, 4))], "sentence": ["s"], "label": ["true"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict(dev=rows).save_to_disk(str(tmp_path / "many"))
    for name, split in (("one", "train"), ("many", "dev")):
        ((origin, found),) = CONVERTERS["nlvr"].read(Source(dataset_path=str(tmp_path / name), split=split))
        assert origin == Origin(str(tmp_path / name), 0)
        assert found.images[0]["bytes"].startswith(b"\x89PNG")  # not decoded


def test_a_hub_name_is_streamed_with_its_configuration(monkeypatch):
    """A name of the form of the hub's, the hub itself being out of reach."""
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return Dataset.from_dict({"file": [1, 2]}).to_iterable_dataset()

    monkeypatch.setattr("vgr_trl.data.read.load_dataset", load)
    source = Source(dataset_name="someone/set", config="standard", split="test")
    assert files_of(source) == [1, 2]
    assert asked == [("someone/set", {"name": "standard", "split": "test", "streaming": True})]
