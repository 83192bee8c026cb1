"""Files, folders and the hub as `convert` and `inspect` read them; damaged files give a sentence, never another row."""

import re

import pytest
from datasets import Dataset, DatasetDict
from PIL import Image
from support.made_sets import converted, jsonl, parquet, picture, written

from vgr_trl.data.load import has_config, load_path, load_split, row_files, splits_of
from vgr_trl.utils import DataError

ROWS = [{"prompt": f"q{number}", "answer": "a", "image": picture((number, 0, 0))} for number in range(40)]


def test_rows_come_in_order_with_their_types(tmp_path):
    (tmp_path / "b.jsonl").write_text('\ufeff{"prompt": 1}\n\n{"prompt": "1"}')
    parquet(tmp_path / "a.parquet", ROWS)
    rows = load_split("train", data_files=f"{tmp_path}/a.parquet")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert list(load_split("train", data_files=f"{tmp_path}/b.jsonl")["prompt"]) == [1, "1"]


def test_a_byte_that_changed_in_a_written_set_is_found(tmp_path):
    """Written sets carry checksums: a changed pixel would otherwise be another row in silence."""
    rows = [{"id": f"q{n}", "problem": "p", "solution": "x", "images": [picture((n, 0, 0))]} for n in range(5)]
    written(rows, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.parquet")
    assert len(load_split("train", data_files=str(file))) == 5
    data = bytearray(file.read_bytes())
    place = data.index(picture((3, 0, 0))["bytes"])
    data[place + 40] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="cannot be read .*: check data_files, and that it is complete"):
        load_split("train", data_files=str(file))


def folder(tmp_path, *names):
    for name in names:
        jsonl(tmp_path / name, [{"file": name}])
    return str(tmp_path)


def files_of(path, **options):
    return list(load_split(options.pop("split", "train"), dataset_path=path, **options)["file"])


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    path = folder(tmp_path, "b.jsonl", "sub/a.jsonl", "a.jsonl", ".hidden.jsonl", ".cache/x.jsonl", "skipped.jsonl")
    assert files_of(path) == ["a.jsonl", "b.jsonl", "sub/a.jsonl"]
    before = load_split("train", dataset_path=path)._fingerprint
    assert load_split("train", dataset_path=path)._fingerprint == before
    jsonl(tmp_path / "a.jsonl", [{"file": "1"}, {"file": "1"}])
    assert load_split("train", dataset_path=path)._fingerprint != before


def test_file_names_say_the_split(tmp_path):
    names = [f"data/train-0000{n}-of-00002.jsonl" for n in range(2)]
    path = folder(tmp_path, *names, "data/test.jsonl", "val.jsonl")
    assert files_of(path) == names
    assert files_of(path, split="test") == ["data/test.jsonl"]
    assert files_of(path, split="dev") == ["val.jsonl"]
    assert sorted(splits_of(row_files(tmp_path), tmp_path)) == ["test", "train", "validation"]
    with pytest.raises(DataError, match=re.escape("has the splits ['test', 'train', 'validation'], but not 'other'")):
        files_of(path, split="other")


def test_a_configuration_is_a_folder_or_the_start_of_a_name(tmp_path):
    path = folder(tmp_path, "corpus/train.jsonl", "queries-train.jsonl", "queriesold.jsonl")
    assert files_of(path, dataset_config="corpus") == ["corpus/train.jsonl"]
    assert files_of(path, dataset_config="queries") == ["queries-train.jsonl"]
    assert not has_config(tmp_path, "qrels")


def test_sets_of_save_to_disk(tmp_path):
    rows = Dataset.from_dict({"image": [Image.new("RGB", (4, 4))], "sentence": ["s"], "label": ["true"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict(dev=rows).save_to_disk(str(tmp_path / "many"))
    for name, split in (("one", "train"), ("many", "dev")):
        read = load_split(split, dataset_path=str(tmp_path / name))
        ((found,), _) = converted("nlvr", read, tmp_path / f"made_{name}")
        assert found["images"][0]["bytes"].startswith(b"\x89PNG")


def test_a_hub_name_is_read_in_its_configuration(monkeypatch):
    """A name of the form of the hub's, the hub itself being out of reach."""
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return DatasetDict(test=Dataset.from_dict({"file": [1, 2]}))

    monkeypatch.setattr("vgr_trl.data.load.load_dataset", load)
    monkeypatch.setattr("vgr_trl.data.load.why_not_on_hub", lambda *_: None)
    split, loads = load_path("someone/set", config="standard")
    assert (split, list(loads["test"]()["file"])) == ("test", [1, 2])
    assert asked == [("someone/set", {"name": "standard", "streaming": False})]
