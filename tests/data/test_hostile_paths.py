import os
import socket

import pyarrow
import pytest
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from pyarrow import parquet
from support.made_sets import corners, jsonl, loaded

from vgr_trl.errors import DataError

OWN, SECRET = (250, 10, 10), (10, 10, 250)
OUTSIDE = ["../private/secret.png", "link.png", "folder/secret.png", "PLACE/private/secret.png", "/etc/passwd"]
URL = "http://127.0.0.1:9"
NOT_READ = [f"{URL}/a.png", "loop.png", "nul\0.png"]
INSIDE = ["own.png", "inner.png", "../data/own.png", "PLACE/data/own.png"]
IMAGE = {"type": "image"}
PARTS = [
    {"type": "image", "image": f"{URL}/a.png"},
    {"type": "image", "path": "/etc/passwd"},
    {"type": "image_url", "image_url": {"url": f"{URL}/a.png"}},
    {"type": "text", "text": "what?", "path": "own.png"},
]


@pytest.fixture
def place(tmp_path):
    for name, colour in (("data/own.png", OWN), ("private/secret.png", SECRET)):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (30, 20), colour).save(tmp_path / name)
    os.symlink(tmp_path / "private/secret.png", tmp_path / "data/link.png")
    os.symlink(tmp_path / "private", tmp_path / "data/folder")
    os.symlink(tmp_path / "data/own.png", tmp_path / "data/inner.png")
    os.symlink("loop.png", tmp_path / "data/loop.png")
    return tmp_path


def stored(place, kind):
    """A file of questions about these images, which claims that its files lie elsewhere."""
    names = [name.replace("PLACE", str(place)) for name in (*OUTSIDE, *NOT_READ, *INSIDE)]
    rows = [{"question": "?", "answer": "x", "image": name, "__folder__": str(place)} for name in names]
    file = place / f"data/rows.{kind}"
    if kind == "jsonl":
        return jsonl(file, rows)
    # Not written by `datasets`, which would put the files in.
    features = Features(dict.fromkeys(rows[0], Value("string")) | {"image": ImageFeature(decode=False)})
    rows = [row | {"image": {"bytes": None, "path": row["image"]}} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows, features.arrow_schema), file)
    return file


def colours(rows):
    return [corner for row in rows for corner in corners(row)]


@pytest.fixture
def asked(monkeypatch):
    """The addresses that this process connects to, none of which answers."""
    addresses = []

    def connect(_, address):
        addresses.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    return addresses


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("kind", "source"), [("jsonl", "data_files"), ("parquet", "data_files"), ("jsonl", "dataset_path")]
)
def test_training_reads_no_file_outside_of_the_data(place, asked, kind, streaming, source, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    file = stored(place, kind)
    given = {source: str(file if source == "data_files" else place / "data")}
    rows, reasons = loaded(**given, dataset_streaming=streaming)
    assert colours(rows) == [OWN] * len(INSIDE)
    assert sorted(reasons) == list(range(len(OUTSIDE) + len(NOT_READ)))
    assert all(f"is outside {place / 'data'}" in reasons[row] for row in range(len(OUTSIDE)))
    assert "which is not downloaded" in reasons[len(OUTSIDE)]
    assert asked == []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_no_part_of_a_prompt_names_a_file(place, asked, name, streaming):
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]} for part in [*PARTS, IMAGE]]
    rows = [{name: [turn], "answer": "x", "image": "own.png"} for turn in turns]
    file = jsonl(place / "data/rows.jsonl", rows)
    found, reasons = loaded(data_files=str(file), dataset_streaming=streaming)
    assert colours(found) == [OWN]
    assert all("only image and video columns are read" in reason for reason in reasons.values())
    assert len(reasons) == len(PARTS)
    assert asked == []


@pytest.mark.parametrize(
    ("name", "named"),
    [("README.md", "../private/x.parquet"), ("README.md", f"{URL}/x.parquet"), (".huggingface.yaml", "link/*")],
)
def test_a_card_leads_to_no_files_elsewhere(place, asked, name, named):
    Dataset.from_list([{"question": "own", "answer": "x"}]).to_parquet(place / "data/train.parquet")
    Dataset.from_list([{"question": "secret", "answer": "x"}]).to_parquet(place / "private/x.parquet")
    os.symlink(place / "private", place / "data/link")
    for files in ("PATH", "[{split: train, path: [train.parquet, PATH]}]"):
        said = f"configs: [{{config_name: default, data_files: {files}}}]".replace("PATH", f"'{named}'")
        (place / "data" / name).write_text(f"---\n{said}\n---\n# A set\n" if name.endswith("md") else said)
        with pytest.raises(DataError, match="The data set card .*(names a URL|which is outside)"):
            loaded(dataset_path=str(place / "data"))
    assert asked == []


def test_a_card_may_name_files_of_its_folder(place):
    for path in [*(place / "data").glob("*.png"), place / "data/folder"]:
        path.unlink()
    Dataset.from_list([{"question": "own", "answer": "x"}]).to_parquet(place / "data/rows.parquet")
    card = "configs: [{config_name: default, data_files: [{split: train, path: rows*}]}]"
    (place / "data/README.md").write_text(f"---\nlicense: mit\n{card}\n---\n")
    rows, _ = loaded(dataset_path=str(place / "data"))
    assert [row["prompt"][-1]["content"] for row in rows] == ["own"]
