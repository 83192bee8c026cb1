import pytest
from datasets import Dataset, DatasetDict
from support.made_sets import jsonl, parquet, picture, written

from vgr_trl.data.load import load_split, parse_data_files, readable
from vgr_trl.errors import ConfigError, DataError

PROBLEMS = ["1 + 1?", "1 + 2?"]
ROWS = Dataset.from_dict({"problem": PROBLEMS, "solution": ["2", "3"]})
SOURCES = ["data_files train=FOLDER/no.parquet", "dataset_path FOLDER/no", "dataset_path FOLDER/two",
           "data_files FOLDER/text.txt", "dataset_name no-such-owner/no-such-set"]  # fmt: skip


def test_saved_data_sets_and_parquet_keep_their_rows(tmp_path):
    ROWS.to_parquet(tmp_path / "files" / "test.parquet")
    (tmp_path / "files" / "dataset_infos.json").write_text("{}")  # beside other files, JSON describes them
    DatasetDict(dev=ROWS).save_to_disk(tmp_path / "saved_dict")
    ROWS.save_to_disk(tmp_path / "saved")
    for folder, split in (("files", "test"), ("saved_dict", "dev"), ("saved", "train")):
        assert load_split(split, dataset_path=str(tmp_path / folder))["solution"] == ["2", "3"]
    with pytest.raises(DataError):
        load_split("test", dataset_path=str(tmp_path / "saved"))


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


def test_the_last_word_of_a_path_says_the_split(tmp_path):
    names = [f"data/train-0000{n}-of-00002.jsonl" for n in range(2)]
    path = folder(tmp_path, *names, "data/test.jsonl", "train_val_split_val.jsonl")
    assert files_of(path) == names
    assert files_of(path, split="test") == ["data/test.jsonl"]
    assert files_of(path, split="dev") == ["train_val_split_val.jsonl"]
    with pytest.raises(DataError):
        files_of(path, split="other")


def test_a_configuration_is_a_folder_or_the_start_of_a_name(tmp_path):
    path = folder(tmp_path, "corpus/train.jsonl", "queries-train.jsonl", "queriesold.jsonl")
    assert files_of(path, dataset_config="corpus") == ["corpus/train.jsonl"]
    assert files_of(path, dataset_config="queries") == ["queries-train.jsonl"]


def test_a_byte_that_changed_in_a_written_set_is_found(tmp_path):
    """Written sets carry checksums: a changed pixel would otherwise be another row in silence."""
    rows = [{"id": f"q{n}", "problem": "p", "solution": "x", "images": [picture((n, 0, 0))]} for n in range(5)]
    written(rows, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.parquet")
    assert len(load_split("train", data_files=str(file))) == 5
    data = bytearray(file.read_bytes())
    data[data.index(picture((3, 0, 0))["bytes"]) + 40] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError):
        load_split("train", data_files=str(file))


def test_json_keeps_its_types_and_csv_its_texts(tmp_path):
    lines = tmp_path / "metadata.jsonl"
    lines.write_text('\ufeff{"solution": 1, "choices": ["1"]}\n\n{"solution": "1"}\n{"solution": "\\ud800"}')
    rows = load_split("train", data_files=str(lines))
    assert list(rows["solution"]) == [1, "1", None]
    assert list(rows["choices"]) == [["1"], None, None]
    assert rows[2]["__unreadable__"] == "its text has characters that are not Unicode"
    lines.write_text('{"problem": "q", "solution": "1"}\n{"problem": "q", "solution": 1}\n')
    with pytest.raises(DataError):  # `datasets` reads 1 twice
        load_split("train", dataset_path=str(tmp_path))
    path = tmp_path / "a" / "a.csv"
    path.parent.mkdir()
    path.write_text("\ufeffproblem,solution,choices\n\"1, 2?\",007,\nq,NA,\"['1', '2']\"\n\nq\n")
    for rows in (load_split("train", data_files=str(path)), load_split("train", dataset_path=str(path.parent))):
        assert list(rows["solution"]) == ["007", "NA", None]
        assert list(rows["problem"]) == ["1, 2?", "q", None]
        assert list(rows["choices"]) == [None, "['1', '2']", None]
        assert rows[2]["__unreadable__"] == "the line has another number of values than there are columns"
    path.write_text("problem,problem\nq,x\n")
    with pytest.raises(DataError):
        load_split("train", data_files=str(path))


@pytest.mark.parametrize("streaming", [False, True])
def test_values_inside_others_become_columns(tmp_path, streaming):
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]
    row = {"prompt": [{"role": "user", "content": parts}], "reward_model": {"style": "rule", "ground_truth": "3"}}
    Dataset.from_list([row] * 2).to_parquet(tmp_path / "a.parquet")
    read = next(iter(load_split("train", data_files=str(tmp_path / "a.parquet"), streaming=streaming)))
    assert (read["images"], read["reward_model.ground_truth"]) == (["a.png"], "3")
    assert read["prompt"][0]["content"] == "<image>q"


def test_several_files_of_a_split(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "c+d.jsonl"):
        jsonl(tmp_path / name, [{"file": name}])
    for text, files in (
        (f"train={tmp_path}/b.jsonl+{tmp_path}/a.jsonl,test={tmp_path}/c+d.jsonl", ["b.jsonl", "a.jsonl"]),
        (f"{tmp_path}/?.jsonl", ["a.jsonl", "b.jsonl"]),
        (f"{tmp_path}/c+d.jsonl", ["c+d.jsonl"]),
    ):
        assert list(load_split("train", data_files=text)["file"]) == files
    for text in ("train=", "=a.parquet", "", "train=a.jsonl,", "train=a.jsonl+"):
        with pytest.raises(ConfigError):
            parse_data_files(text)


@pytest.mark.parametrize("source", SOURCES)
def test_missing_and_unreadable_sources_are_refused(tmp_path, source):
    parquet(tmp_path / "two" / "b.parquet", [{"problem": "q"}])
    jsonl(tmp_path / "two" / "a.jsonl", [{"problem": "q"}])
    (tmp_path / "text.txt").write_text("hello")
    name, value = source.replace("FOLDER", str(tmp_path)).split()
    for streaming in (False, True):
        with pytest.raises((ConfigError, DataError)), readable("torn.parquet", "data_files"):
            list(load_split("train", **{name: value}, streaming=streaming))
