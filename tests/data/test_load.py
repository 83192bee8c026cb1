import json
import re

import pytest
from datasets import Dataset, DatasetDict

from vgr_trl.data.load import load_split
from vgr_trl.data.read import parse_data_files, readable
from vgr_trl.utils import ConfigError, DataError

ROWS = Dataset.from_dict({"problem": ["1 + 1?", "1 + 2?"], "solution": ["2", "3"]})


@pytest.mark.parametrize(("suffix", "write"), [("parquet", "to_parquet"), ("jsonl", "to_json"), ("csv", "to_csv")])
def test_files_become_splits(tmp_path, suffix, write):
    getattr(ROWS, write)(tmp_path / f"a.{suffix}")
    files = f"train={tmp_path}/a.{suffix},test={tmp_path}/a.{suffix}"
    for split in ("train", "test"):
        assert load_split(split, data_files=files)["problem"] == ["1 + 1?", "1 + 2?"]
    stream = load_split("train", data_files=files, streaming=True)
    assert [row["problem"] for row in stream] == ["1 + 1?", "1 + 2?"]


def test_one_file_is_the_train_split(tmp_path):
    ROWS.to_parquet(tmp_path / "a.parquet")
    assert len(load_split("train", data_files=str(tmp_path / "a.parquet"))) == 2


def test_folders_of_files_and_saved_data_sets(tmp_path):
    (tmp_path / "files").mkdir()
    ROWS.to_parquet(tmp_path / "files" / "train.parquet")
    ROWS.to_parquet(tmp_path / "files" / "test.parquet")
    DatasetDict(train=ROWS, test=ROWS).save_to_disk(tmp_path / "saved_dict")
    ROWS.save_to_disk(tmp_path / "saved")
    for folder, split in (("files", "test"), ("saved_dict", "test"), ("saved", "train")):
        assert load_split(split, dataset_path=str(tmp_path / folder))["solution"] in (["2", "3"], [2, 3])


def test_malformed_data_files_are_refused():
    for text in ("train=", "=a.parquet", "", "train=a.jsonl,", "train=a.jsonl+"):
        with pytest.raises(
            ConfigError, match=re.escape(f"data_files is {text!r}: give train=a.jsonl+b.jsonl,test=c.parquet")
        ):
            parse_data_files(text)
    with pytest.raises(ConfigError, match="names a file of train twice"):
        parse_data_files("a.jsonl+./a.jsonl")


def test_several_files_of_a_split(tmp_path):
    for number in range(3):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"problem": f"q{number}", "solution": "x"}))
    ROWS.to_parquet(tmp_path / "part3.parquet")
    ROWS.to_parquet(tmp_path / "a+b.parquet")
    a, b, c, d = (str(path) for path in sorted(tmp_path.glob("part*")))
    q = ["q0", "q1", "q2"]
    for text, problems in (
        (f"train={a}+{b}+{c}", q),
        (f"train={a},train={b},{c}", q),
        (f"train={tmp_path}/*.jsonl,test={d}", q),
        (f"{c}+{d}", ["q2", *ROWS["problem"]]),
        (f"{tmp_path}/a+b.parquet", ROWS["problem"]),
    ):
        assert list(load_split("train", data_files=text)["problem"]) == problems
        assert [row["problem"] for row in load_split("train", data_files=text, streaming=True)] == problems


def test_files_of_one_split_with_other_types_are_refused(tmp_path):
    Dataset.from_dict({"problem": [1, 2]}).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict({"problem": [[1.5]]}).to_parquet(tmp_path / "b.parquet")
    files = f"train={tmp_path}/a.parquet+{tmp_path}/b.parquet"
    with pytest.raises(DataError, match="b.parquet have columns of different types, so they are no one split"):
        load_split("train", data_files=files)


def test_csv_is_not_typed(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffproblem,solution,choices\n\"1, 2?\",007,\nq,NA,\"['1', '2']\"\n\nq\n")
    rows = load_split("train", data_files=str(tmp_path / "a.csv"))
    assert list(rows["solution"]) == ["007", "NA", None]
    assert list(rows["problem"]) == ["1, 2?", "q", None]
    assert list(rows["choices"]) == [None, "['1', '2']", None]
    assert rows[2]["__unreadable__"] == "the line has 1 values for 3 columns"
    assert list(load_split("train", dataset_path=str(tmp_path))["solution"]) == ["007", "NA", None]
    (tmp_path / "a.csv").write_text("problem,problem\nq,x\n")
    with pytest.raises(DataError, match="give each a name of its own"):
        load_split("train", data_files=str(tmp_path / "a.csv"))


def test_exactly_one_source_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="one of dataset_name, dataset_path and data_files, but none was given"):
        load_split("train")
    with pytest.raises(ConfigError, match="but dataset_name and dataset_path was given"):
        load_split("train", dataset_name="a", dataset_path="b")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: {"data_files": f"train={folder}/no.parquet"}, "no.parquet does not exist"),
        (lambda folder: {"data_files": f"test={folder}/no.parquet"}, "splits ['test'], but the split 'train'"),
        (lambda folder: {"dataset_path": f"{folder}/no"}, "which is not a folder; for single files use data_files"),
        (lambda folder: {"dataset_path": f"{folder}/empty"}, "empty, which is empty"),
        (
            lambda folder: {"data_files": f"train={folder}/empty"},
            "empty is a folder: give its files",
        ),
        (
            lambda folder: {"dataset_path": f"{folder}/two"},
            "two/b.parquet, are no one set: name those to read by data_fi",
        ),
        (lambda folder: {"data_files": f"{folder}/text.txt"}, "text.txt is none of .parquet"),
    ],
)
def test_missing_and_unreadable_sources_are_named(tmp_path, make, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    ROWS.to_parquet(tmp_path / "two" / "b.parquet")
    ROWS.to_json(tmp_path / "two" / "a.jsonl")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(DataError, match=re.escape(message)):
        load_split("train", **make(tmp_path))


def test_errors_of_values_are_the_datas_only_where_nothing_but_reading_happens():
    with pytest.raises(DataError, match=r"a.jsonl cannot be read \(odd\): check data_files, and that it is complete"):
        raise_in(readable("a.jsonl", "data_files", only_reads=True), ValueError("odd"))
    with pytest.raises(ValueError, match="^odd$"):
        raise_in(readable("a.jsonl", "data_files"), ValueError("odd"))
    with pytest.raises(ConfigError, match="^mine$"):
        raise_in(readable("a.jsonl", "data_files", only_reads=True), ConfigError("mine"))


def raise_in(block, error) -> None:
    with block:
        raise error


def test_a_missing_split_names_the_others(tmp_path):
    (tmp_path / "files").mkdir()
    ROWS.to_parquet(tmp_path / "files" / "train.parquet")
    with pytest.raises(DataError, match=re.escape("has the splits ['train'], but not 'test': name one of them.")):
        load_split("test", dataset_path=str(tmp_path / "files"))


def test_an_unknown_hub_name_is_a_sentence():
    with pytest.raises(DataError, match="No data set is found at no-such-owner/no-such-set"):
        load_split("train", dataset_name="no-such-owner/no-such-set")
