import re

import pytest
from datasets import Dataset, DatasetDict
from PIL import Image
from support.made_sets import jsonl, picture, rows_in, written

from vgr_trl.data import public_sets as nlvr
from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read import Source, splits_in
from vgr_trl.utils import ConfigError, DataError

ROW = {"a": 1}


def rows_of(source, config=None):
    return [row for _, row in source.records(config)]


def folder(tmp_path, *names):
    for name in names:
        jsonl(tmp_path / name, [{"file": name}])
    return str(tmp_path)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    path = folder(tmp_path, "b.jsonl", "sub/a.jsonl", "a.jsonl", ".hidden.jsonl", ".cache/x.jsonl", "skipped.jsonl")
    assert [row["file"] for row in rows_of(Source(dataset_path=path))] == ["a.jsonl", "b.jsonl", "sub/a.jsonl"]


def test_a_split_is_told_by_the_names(tmp_path):
    path = folder(tmp_path, "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test.jsonl")
    assert len(rows_of(Source(dataset_path=path))) == 2
    assert [row["file"] for row in rows_of(Source(dataset_path=path, split="test"))] == ["data/test.jsonl"]
    assert splits_in(tmp_path) == ["test", "train"]
    with pytest.raises(DataError, match=re.escape("has files of the splits ['test', 'train'], but not of 'dev'")):
        Source(dataset_path=path, split="dev").records()


def test_a_configuration_is_a_folder_or_the_start_of_a_name(tmp_path):
    path = folder(tmp_path, "corpus/train.jsonl", "queries-train.jsonl", "queriesold.jsonl")
    source = Source(dataset_path=path)
    assert [row["file"] for row in rows_of(source, "corpus")] == ["corpus/train.jsonl"]
    assert [row["file"] for row in rows_of(source, "queries")] == ["queries-train.jsonl"]
    with pytest.raises(DataError, match="has no .parquet or .jsonl or .json or .csv file of 'qrels'"):
        source.records("qrels")


def test_named_files(tmp_path):
    folder(tmp_path, "c.jsonl", "q.jsonl")
    source = Source(data_files=[f"corpus={tmp_path}/c.jsonl", f"queries={tmp_path}/q.jsonl"])
    assert rows_of(source, "queries") == [{"file": "q.jsonl"}]
    with pytest.raises(
        DataError, match="data_files names corpus, queries, but qrels is needed too: give it as qrels=FILE"
    ):
        source.records("qrels")
    with pytest.raises(DataError, match="data_files names no configuration, but queries is needed too"):
        Source(data_files=[f"{tmp_path}/q.jsonl"]).records("queries")
    assert rows_of(Source(data_files=[f"{tmp_path}/q.jsonl"], config="vision")) == [{"file": "q.jsonl"}]


def test_what_save_to_disk_left(tmp_path):
    rows = Dataset.from_dict({"image": [Image.new("RGB", (4, 4))], "sentence": ["s"], "label": ["true"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict(dev=rows).save_to_disk(str(tmp_path / "many"))
    for name, split in (("one", "train"), ("many", "dev")):
        ((origin, found),) = nlvr.nlvr_read(Source(dataset_path=str(tmp_path / name), split=split))
        assert origin == Origin(str(tmp_path / name), 0)
        assert found.images[0]["bytes"].startswith(b"\x89PNG")  # not decoded
    with pytest.raises(DataError, match=re.escape("has the splits ['dev'], but not 'train'")):
        rows_of(Source(dataset_path=str(tmp_path / "many")))
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"nonsense")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "dataset_dict.json").write_text('{"splits": 3}')
    with pytest.raises(DataError, match="odd cannot be read beyond row 0"):
        rows_of(Source(dataset_path=str(tmp_path / "odd")))
    with pytest.raises(DataError, match="one cannot be read beyond row 0"):
        rows_of(Source(dataset_path=str(tmp_path / "one")))


def test_a_hub_name_is_streamed_with_its_configuration(monkeypatch):
    """A name of the form of the hub's, the hub itself being out of reach."""
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return Dataset.from_dict({"image": [Image.new("RGB", (4, 4))] * 2}).to_iterable_dataset()

    monkeypatch.setattr("datasets.load_dataset", load)
    source = Source(dataset_name="someone/set", config="standard", split="test")
    found = list(source.records())
    assert asked == [("someone/set", {"name": "standard", "split": "test", "streaming": True})]
    assert [origin for origin, _ in found] == [Origin("someone/set", 0), Origin("someone/set", 1)]
    assert found[0][1]["image"]["bytes"].startswith(b"\x89PNG")
    assert source.count() is None


def test_a_hub_out_of_reach_is_one_sentence():
    with pytest.raises(DataError, match="someone/nothing cannot be read beyond row 0 .*: check name and network"):
        rows_of(Source(dataset_name="someone/nothing"))


@pytest.mark.parametrize("given", [{}, {"dataset_name": "a", "dataset_path": "b"}])
def test_one_source_is_named(given):
    with pytest.raises(ConfigError, match="Data come from one of dataset_name, dataset_path, data_files, but"):
        Source(**given)


def test_folders_without_rows(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="has no .parquet or .jsonl or .json or .csv file"):
        Source(dataset_path=str(tmp_path)).records()
    with pytest.raises(DataError, match="which is not a folder; for single files use data_files"):
        Source(dataset_path=str(tmp_path / "a.txt")).records()


def test_what_a_source_depends_on(tmp_path):
    source = Source(dataset_path=folder(tmp_path, "a.jsonl"))
    before = source.identity()
    assert source.identity() == before
    jsonl(tmp_path / "a.jsonl", [ROW, ROW, ROW])
    assert source.identity() != before


def test_what_is_written_can_be_converted_again(tmp_path):
    asked = Question("q7", "made", "Which?", "B", [picture((7, 0, 0))], ["x", "y"])
    written([(Origin("f", 0), asked)], tmp_path / "a", several_images=True)
    again = CONVERTERS["jsonl"].read(Source(dataset_path=str(tmp_path / "a")))
    written(again, tmp_path / "b", several_images=True)
    assert rows_in(tmp_path / "b") == rows_in(tmp_path / "a")
