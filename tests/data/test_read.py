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
from support.made_sets import IMAGE, jsonl, parquet, picture, questions, reasons, rows_in, written

from vgr_trl.data import read as readers
from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.data.read import Source, count_rows, read_files, splits_in
from vgr_trl.utils import ConfigError, DataError

WHATEVER = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


ROWS = [{"prompt": f"q{number}", "answer": "a", "image": picture((number, 0, 0))} for number in range(40)]


def test_rows_come_in_order_with_their_places(tmp_path):
    paths = [parquet(tmp_path / "a.parquet", ROWS), tmp_path / "b.jsonl"]
    paths[1].write_text('{"prompt": 1}\n\n{"prompt": 2}')
    found = list(read_files(paths))
    assert [origin for origin, _ in found] == [Origin(str(paths[0]), row) for row in range(40)] + [
        Origin(str(paths[1]), 0),
        Origin(str(paths[1]), 2),
    ]
    assert [row for _, row in found] == [*ROWS, {"prompt": 1}, {"prompt": 2}]
    assert (count_rows(paths[:1]), count_rows(paths)) == (40, None)


def test_lines_that_are_too_long_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE", 20)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": "' + "x" * 90 + '"}\n{"c": "1234567890"}\n{"d": "12345678901"}')
    assert [row for _, row in read_files([tmp_path / "a.jsonl"])] == [
        {"a": 1},
        "the line has more than 20 bytes",
        {"c": "1234567890"},  # 19 bytes and the end of the line
        {"d": "12345678901"} if len('{"d": "12345678901"}') < 20 else "the line has more than 20 bytes",
    ]


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


def test_a_missing_file_is_named_before_the_first_row(tmp_path):
    source = Source(data_files=[str(parquet(tmp_path / "a.parquet", ROWS)), str(tmp_path / "b.parquet")])
    with pytest.raises(DataError, match="b.parquet does not exist"):
        source.records()


def file_of(rows) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=10)
    return sink.getvalue()


PARQUET = file_of(ROWS)


JSONL = "".join(json.dumps({"prompt": f"q{n}", "answer": "a", "image": "a.png"}) + "\n" for n in range(20)).encode()


def convert_bytes(folder, name: str, data: bytes):
    """Convert a file of the user's own, and return the rows and reasons, or the error's sentence."""
    (folder / name).write_bytes(data)
    try:
        return list(CONVERTERS["jsonl"].read(Source(data_files=[str(folder / name)])))
    except DataError as error:
        return str(error)


def is_sentence(text: str) -> bool:
    return text.startswith("The file ") and text.endswith(".") and "\n" not in text and "Traceback" not in text


@WHATEVER
@given(length=st.integers(1, len(PARQUET) - 1))
def test_truncated_parquet(tmp_path, length):
    found = convert_bytes(tmp_path, "a.parquet", PARQUET[:length])
    assert isinstance(found, str)
    assert is_sentence(found)
    assert "check that it is complete" in found


@WHATEVER
@given(place=st.integers(0, len(PARQUET) - 1), patch=st.binary(min_size=1, max_size=8))
def test_damaged_parquet_never_gives_a_row_of_other_type(tmp_path, place, patch):
    data = bytearray(PARQUET)
    data[place : place + len(patch)] = patch
    found = convert_bytes(tmp_path, "a.parquet", bytes(data))
    if isinstance(found, str):
        assert is_sentence(found)
    else:
        for question in questions(found):
            assert isinstance(question.problem, str)
            assert isinstance(question.solution, str)
            assert question.problem.strip()


@WHATEVER
@given(length=st.integers(1, len(JSONL) - 1))
def test_truncated_jsonl_loses_the_cut_row_alone(tmp_path, length):
    found = convert_bytes(tmp_path, "a.jsonl", JSONL[:length])
    assert not isinstance(found, str)
    whole = len([line for line in JSONL[:length].split(b"\n") if line.endswith(b"}")])
    assert [question.problem for question in questions(found)] == [f"q{number}" for number in range(whole)]
    assert len(found) in (whole, whole + 1)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["A", "B", "1"])
)


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


COLUMNS = {
    "aokvqa": ("image", "question_id", "question", "choices", "correct_choice_idx"),
    "mmmu_pro": ("id", "question", "options", "answer", "image_1", "image_2", "image"),
    "jsonl": ("id", "prompt", "answer", "images", "videos", "choices", "source"),
    "easy_vqa": ("image_id", "image", "questions", "answers"),
    "nlvr": ("identifier", "image", "sentence", "label"),
}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(sorted(COLUMNS)))
def test_values_of_any_type_give_a_reason_or_a_whole_row(tmp_path, data, name):
    rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS[name], VALUES)), max_size=5))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) or "\n")
    candidates = list(CONVERTERS[name].read(Source(data_files=[str(path)])))
    assert {origin.row for origin, _ in candidates} == set(range(len(rows)))
    for _, reason in candidates:
        assert not isinstance(reason, str) or (reason and "\n" not in reason)
    for question in questions(candidates):
        assert question.problem.strip()
        assert question.solution.strip()
        assert question.images or question.videos
        if question.choices is not None:
            assert 2 <= len(question.choices) <= 10
            assert question.solution in "ABCDEFGHIJ"[: len(question.choices)]


COLUMNS_OF_OTHER_TYPES = [
    pyarrow.array([b"\xff\xfe"] * 2, pyarrow.binary()),
    pyarrow.array([1.5, None]),
    pyarrow.array([[["x"]], [[]]]),
    pyarrow.array([{"a": 1}, None]),
    pyarrow.array([10**12, 0], pyarrow.timestamp("us")),
    pyarrow.array([1, 2], pyarrow.decimal128(5)),
    pyarrow.nulls(2),
]


@pytest.mark.parametrize("name", ["question", "choices", "correct_choice_idx", "image", "question_id"])
def test_parquet_columns_of_other_types(tmp_path, name):
    good = {
        "image": pyarrow.array([picture(), picture()], IMAGE),
        "question_id": pyarrow.array(["a", "b"]),
        "question": pyarrow.array(["q", "r"]),
        "choices": pyarrow.array([["x", "y"]] * 2),
        "correct_choice_idx": pyarrow.array([0, 1]),
    }
    for column in COLUMNS_OF_OTHER_TYPES:
        pyarrow.parquet.write_table(pyarrow.table({**good, name: column}), tmp_path / "a.parquet")
        candidates = list(CONVERTERS["aokvqa"].read(Source(data_files=[str(tmp_path / "a.parquet")])))
        if name == "question_id":  # a missing id is made up; others are refused
            assert len(candidates) == 2
        elif name == "image":  # its bytes are looked at when they are decoded
            with pytest.raises(DataError, match="None of the 2 rows can be used"):
                written(candidates, tmp_path / "out")
        else:
            assert len(reasons(candidates)) == 2


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
        ((origin, found),) = CONVERTERS["nlvr"].read(Source(dataset_path=str(tmp_path / name), split=split))
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

    monkeypatch.setattr("vgr_trl.data.read.load_dataset", load)
    source = Source(dataset_name="someone/set", config="standard", split="test")
    found = list(source.records())
    assert asked == [("someone/set", {"name": "standard", "split": "test", "streaming": True})]
    assert [origin for origin, _ in found] == [Origin("someone/set", 0), Origin("someone/set", 1)]
    assert found[0][1]["image"]["bytes"].startswith(b"\x89PNG")
    assert source.count() is None


def test_a_hub_out_of_reach_is_one_sentence():
    with pytest.raises(DataError, match="someone/nothing cannot be read beyond row 0 .*: check the name"):
        rows_of(Source(dataset_name="someone/nothing"))


@pytest.mark.parametrize("given", [{}, {"dataset_name": "a", "dataset_path": "b"}])
def test_one_source_is_named(given):
    with pytest.raises(ConfigError, match="Data come from one of dataset_name, dataset_path, data_files, but"):
        Source(**given)


def test_what_a_source_depends_on(tmp_path):
    source = Source(dataset_path=folder(tmp_path, "a.jsonl"))
    before = source.identity()
    assert source.identity() == before
    jsonl(tmp_path / "a.jsonl", [ROW, ROW, ROW])
    assert source.identity() != before


def test_what_is_written_can_be_converted_again(tmp_path):
    asked = Question("q7", "made", "Which?", "B", [picture((7, 0, 0))], ["x", "y"])
    written([(Origin("f", 0), asked)], tmp_path / "a", columns=("images",))
    again = CONVERTERS["jsonl"].read(Source(dataset_path=str(tmp_path / "a")))
    written(again, tmp_path / "b", columns=("images",))
    assert rows_in(tmp_path / "b") == rows_in(tmp_path / "a")
