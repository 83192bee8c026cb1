"""Files, folders and the hub as `Source` reads them; damaged files give a sentence or a reason, never another row."""

import io
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.made_sets import jsonl, parquet, picture, questions, written

from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read import Source, count_rows, read_files, splits_in
from vgr_trl.utils import ConfigError, DataError

WHATEVER = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
ROWS = [{"prompt": f"q{number}", "answer": "a", "image": picture((number, 0, 0))} for number in range(40)]


def test_rows_come_in_order_with_their_places(tmp_path):
    paths = [parquet(tmp_path / "a.parquet", ROWS), tmp_path / "b.jsonl"]
    paths[1].write_text('\ufeff{"prompt": 1}\n\n{"prompt": 2}')
    found = list(read_files(paths))
    places = [(0, row) for row in range(40)] + [(1, 0), (1, 2)]
    assert [origin for origin, _ in found] == [Origin(str(paths[file]), row) for file, row in places]
    assert [row for _, row in found] == [*ROWS, {"prompt": 1}, {"prompt": 2}]
    assert (count_rows(paths[:1]), count_rows(paths)) == (40, None)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.tsv", b"x", "a.tsv is none of .parquet, .jsonl, .json"),
        ("a.json", b'[{"a": 1}', "a.json cannot be read beyond row 0 (Expecting"),
        ("a.json", b"[\xff]", "a.json cannot be read beyond row 0"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=re.escape(words)):
        list(read_files([tmp_path / name]))


def convert_bytes(folder, name: str, data: bytes):
    """Convert a file of the user's own, and return the rows and reasons, or the error's sentence."""
    (folder / name).write_bytes(data)
    try:
        return list(CONVERTERS["jsonl"].read(Source(data_files=[str(folder / name)])))
    except DataError as error:
        sentence = str(error)
        assert sentence.startswith("The file ")
        assert sentence.endswith(".")
        assert "\n" not in sentence
        return sentence


SINK = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), SINK, row_group_size=10)
PARQUET = SINK.getvalue()
JSONL = "".join(json.dumps({"prompt": f"q{n}", "answer": "a", "image": "a.png"}) + "\n" for n in range(20)).encode()


@WHATEVER
@given(length=st.integers(1, len(PARQUET) - 1), place=st.integers(0, len(PARQUET) - 1), patch=st.binary(min_size=1))
def test_truncated_or_damaged_parquet_gives_no_row_of_another_type(tmp_path, length, place, patch):
    assert "check that it is complete" in convert_bytes(tmp_path, "a.parquet", PARQUET[:length])
    found = convert_bytes(tmp_path, "a.parquet", PARQUET[:place] + patch + PARQUET[place + len(patch) :])
    for question in questions(found) if isinstance(found, list) else []:
        assert question.problem.strip()
        assert isinstance(question.solution, str)


@WHATEVER
@given(length=st.integers(1, len(JSONL) - 1))
def test_truncated_jsonl_loses_the_cut_row_alone(tmp_path, length):
    found = convert_bytes(tmp_path, "a.jsonl", JSONL[:length])
    whole = len([line for line in JSONL[:length].split(b"\n") if line.endswith(b"}")])
    assert [question.problem for question in questions(found)] == [f"q{number}" for number in range(whole)]
    assert len(found) in (whole, whole + 1)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from("AB1")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
COLUMNS = {
    "aokvqa": ("image", "question_id", "question", "choices", "correct_choice_idx"),
    "mmmu_pro": ("id", "question", "options", "answer", "image_1", "image_2", "image"),
    "jsonl": ("id", "prompt", "answer", "images", "videos", "choices", "source"),
}


@WHATEVER
@given(data=st.data(), name=st.sampled_from(sorted(COLUMNS)))
def test_values_of_any_type_give_a_reason_or_a_whole_row(tmp_path, data, name):
    rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS[name], VALUES)), max_size=5))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) or "\n")
    candidates = list(CONVERTERS[name].read(Source(data_files=[str(path)])))
    assert {origin.row for origin, _ in candidates} == set(range(len(rows)))
    for question in questions(candidates):
        assert question.problem.strip()
        assert question.solution.strip()
        assert question.images or question.videos
        if question.choices is not None:
            assert 2 <= len(question.choices) <= 10
            assert question.solution in "ABCDEFGHIJ"[: len(question.choices)]


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
    with pytest.raises(DataError, match="has no .parquet or .jsonl or .json or .csv file of 'qrels'"):
        source.records("qrels")
    source = Source(data_files=[f"corpus={path}/corpus/train.jsonl", f"queries={path}/queriesold.jsonl"])
    assert files_of(source, "queries") == ["queriesold.jsonl"]
    with pytest.raises(DataError, match="names corpus, queries, but qrels is needed too: give it as qrels=FILE"):
        source.records("qrels")
    with pytest.raises(DataError, match="b.parquet does not exist"):  # before the first row
        Source(data_files=[f"{path}/queriesold.jsonl", f"{path}/b.parquet"]).records()


def test_sets_of_save_to_disk(tmp_path):
    rows = Dataset.from_dict({"image": [Image.new("RGB", (4, 4))], "sentence": ["s"], "label": ["true"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict(dev=rows).save_to_disk(str(tmp_path / "many"))
    for name, split in (("one", "train"), ("many", "dev")):
        ((origin, found),) = CONVERTERS["nlvr"].read(Source(dataset_path=str(tmp_path / name), split=split))
        assert origin == Origin(str(tmp_path / name), 0)
        assert found.images[0]["bytes"].startswith(b"\x89PNG")  # not decoded
    with pytest.raises(DataError, match=re.escape("has the splits ['dev'], but not 'train'")):
        files_of(Source(dataset_path=str(tmp_path / "many")))
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="one cannot be read"):
        files_of(Source(dataset_path=str(tmp_path / "one")))


def test_a_hub_name_is_streamed_with_its_configuration(monkeypatch):
    """A name of the form of the hub's, the hub itself being out of reach."""
    with pytest.raises(DataError, match="No data set is found at someone/nothing .*: check the name"):
        files_of(Source(dataset_name="someone/nothing"))
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return Dataset.from_dict({"file": [1, 2]}).to_iterable_dataset()

    monkeypatch.setattr("vgr_trl.data.read.load_dataset", load)
    source = Source(dataset_name="someone/set", config="standard", split="test")
    assert (files_of(source), source.count()) == ([1, 2], None)
    assert asked == [("someone/set", {"name": "standard", "split": "test", "streaming": True})]


def test_one_source_is_named():
    with pytest.raises(ConfigError, match="one of dataset_name, dataset_path, data_files, but none was given"):
        Source()
    with pytest.raises(ConfigError, match="but dataset_name and dataset_path was given"):
        Source(dataset_name="a", dataset_path="b")
