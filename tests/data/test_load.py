"""Data sets from files, folders and the hub, as training loads them."""

import json
import re

import pytest
from datasets import Dataset, DatasetDict

from vgr_trl.data.load import load_split, parse_data_files, readable
from vgr_trl.utils import ConfigError, DataError

PROBLEMS = ["1 + 1?", "1 + 2?"]
ROWS = Dataset.from_dict({"problem": PROBLEMS, "solution": ["2", "3"]})


def test_folders_of_files_and_saved_data_sets(tmp_path):
    for split in ("train", "test"):
        ROWS.to_parquet(tmp_path / "files" / f"{split}.parquet")
        ROWS.to_json(tmp_path / "lines" / f"{split}.jsonl")
    DatasetDict(train=ROWS, test=ROWS).save_to_disk(tmp_path / "saved_dict")
    ROWS.save_to_disk(tmp_path / "saved")
    for folder, split in (("files", "test"), ("lines", "test"), ("saved_dict", "test"), ("saved", "train")):
        assert load_split(split, dataset_path=str(tmp_path / folder))["solution"] == ["2", "3"]
    with pytest.raises(DataError, match=re.escape("has the splits ['train'], but not 'test': name one of them.")):
        load_split("test", dataset_path=str(tmp_path / "saved"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_is_of_the_last_split_that_its_name_says(tmp_path, suffix):
    for split, rows in (("train", ROWS), ("val", ROWS.select([0]))):
        write = rows.to_json if suffix == "jsonl" else rows.to_parquet
        write(tmp_path / f"train_val_split_{split}.{suffix}")
    numbers = [len(load_split(split, dataset_path=str(tmp_path))) for split in ("train", "validation")]
    assert numbers == [2, 1]


def test_malformed_data_files_are_refused():
    for text in ("train=", "=a.parquet", "", "train=a.jsonl,", "train=a.jsonl+"):
        with pytest.raises(ConfigError, match=re.escape(f"data_files is {text!r}: give train=a.jsonl+b.jsonl,test=c")):
            parse_data_files(text)


def test_several_files_of_a_split(tmp_path):
    for number in range(3):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"problem": f"q{number}", "solution": "x"}))
    ROWS.to_parquet(tmp_path / "part3.parquet")
    ROWS.to_parquet(tmp_path / "a+b.parquet")
    a, b, c, d = (str(path) for path in sorted(tmp_path.glob("part*")))
    q = ["q0", "q1", "q2"]
    for text, problems in (
        (f"train={a}+{b}+{c}", q),
        (f"train={tmp_path}/*.jsonl,test={d}", q),
        (f"{c}+{d}", ["q2", *PROBLEMS]),
        (f"{tmp_path}/a+b.parquet", PROBLEMS),
    ):
        assert list(load_split("train", data_files=text)["problem"]) == problems
        assert [row["problem"] for row in load_split("train", data_files=text, streaming=True)] == problems


def test_csv_is_not_typed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\ufeffproblem,solution,choices\n\"1, 2?\",007,\nq,NA,\"['1', '2']\"\n\nq\n")
    for rows in (load_split("train", data_files=str(path)), load_split("train", dataset_path=str(tmp_path))):
        assert list(rows["solution"]) == ["007", "NA", None]
        assert list(rows["problem"]) == ["1, 2?", "q", None]
        assert list(rows["choices"]) == [None, "['1', '2']", None]
        assert rows[2]["__unreadable__"] == "the line has 1 values for 3 columns"
    path.write_text("problem,problem\nq,x\n")
    with pytest.raises(DataError, match="give each a name of its own"):
        load_split("train", data_files=str(path))


def test_mixed_types_that_datasets_would_change_are_refused(tmp_path):
    """`datasets` reads the text "1" as the number 1 where a column has both; our own reader does not."""
    (tmp_path / "metadata.jsonl").write_text('{"problem": "q", "solution": "1"}\n{"problem": "q", "solution": 1}\n')
    assert list(load_split("train", data_files=f"{tmp_path}/metadata.jsonl")["solution"]) == ["1", 1]
    with pytest.raises(DataError, match="The column `solution` of .* mixes texts and numbers"):
        load_split("train", dataset_path=str(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "one of dataset_name, dataset_path, data_files, but none was given"),
        ({"data_files": "train=FOLDER/no.parquet"}, "no.parquet does not exist"),
        ({"dataset_path": "FOLDER/no"}, "which is not a folder; for single files use data_files"),
        ({"dataset_path": "FOLDER/two"}, "two/b.parquet, are no one set: name those to read by data_files"),
        ({"data_files": "FOLDER/text.txt"}, "text.txt is none of .parquet"),
        ({"dataset_name": "no-such-owner/no-such-set"}, "No data set is found at no-such-owner/no-such-set"),
    ],
)
def test_missing_and_unreadable_sources_are_named(tmp_path, source, message):
    ROWS.to_parquet(tmp_path / "two" / "b.parquet")
    ROWS.to_json(tmp_path / "two" / "a.jsonl")
    (tmp_path / "text.txt").write_text("hello")
    given = {name: value.replace("FOLDER", str(tmp_path)) for name, value in source.items()}
    for streaming in (False, True):
        with pytest.raises((ConfigError, DataError), match=re.escape(message)), readable("torn.parquet", "data_files"):
            list(load_split("train", **given, streaming=streaming))
