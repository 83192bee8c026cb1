import json

import pytest
from datasets import IterableDataset
from PIL import Image

from vgr_trl.cli.arguments import DataArguments
from vgr_trl.cli.loading import load_rows
from vgr_trl.data.inspect import inspect_rows
from vgr_trl.data.load import load_split
from vgr_trl.data.read import readable
from vgr_trl.data.rows import RowOptions, prepare_rows
from vgr_trl.utils import ConfigError, DataError


@pytest.fixture
def folder(tmp_path):
    """Six rows in two files as `convert` writes them; the image of row 1 and the solution of row 4 are missing."""
    Image.new("RGB", (12, 8), "red").save(tmp_path / "a.png")
    rows = [{"problem": f"q{number}", "solution": "x", "image": "a.png"} for number in range(6)]
    rows[1]["image"] = "missing.png"
    rows[4]["solution"] = None
    for part in range(2):
        lines = [json.dumps(row) + "\n" for row in rows[3 * part : 3 * part + 3]]
        (tmp_path / f"train-0000{part}.jsonl").write_text("".join(lines))
    return tmp_path


def test_flags_make_a_stream_without_its_bad_rows(folder):
    heard = []
    flags = DataArguments(dataset_path=str(folder), dataset_streaming=True, prompt_language="zh")
    stream, skipped = load_rows(flags, "train", needs_solution=True, limit=None, on_skipped=heard.append)
    assert isinstance(stream, IterableDataset)
    for _ in range(2):
        found = list(stream)
        assert [row["problem"] for row in found] == ["q0", "q2", "q3", "q5"]
        assert {image.size for row in found for image in row["images"]} == {(12, 8)}
    assert "图片" in found[0]["prompt"][0]["content"]
    assert (skipped, [row.row for row in heard]) == ([], [1, 4])


def test_a_limit_counts_rows_of_the_source(folder):
    flags = DataArguments(dataset_path=str(folder), dataset_streaming=True)
    stream, _ = load_rows(flags, "train", needs_solution=True, limit=3, on_skipped=lambda row: None)
    assert [row["problem"] for row in stream] == ["q0", "q2"]


def test_rows_are_read_as_they_are_needed():
    read = []

    def rows():
        for number in range(100_000):
            read.append(number)
            yield {"problem": f"q{number}", "solution": "x"}

    stream, _ = prepare_rows(IterableDataset.from_generator(rows))
    read.clear()
    first = [row["problem"] for row, _ in zip(stream, range(5), strict=False)]
    assert first == ["q0", "q1", "q2", "q3", "q4"]
    assert max(read) < 10


def test_a_shuffled_stream_waits_with_undecoded_images(tmp_path):
    Image.new("RGB", (12, 8), "red").save(tmp_path / "a.png")
    lines = [{"id": f"q{number}", "problem": "q", "solution": "x", "image": "a.png"} for number in range(200)]
    lines[7]["image"] = "missing.png"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = DataArguments(data_files=str(tmp_path / "a.jsonl"), dataset_streaming=True)
    opened = []

    def counted(value, root):
        opened.append(value)
        return Image.new("RGB", (1, 1))

    def stream(seed):
        return load_rows(flags, "train", needs_solution=True, limit=None, on_skipped=heard.append, shuffle_seed=seed)[0]

    heard = []
    shuffled = stream(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vgr_trl.data.rows.open_image", counted)
        iterator = iter(shuffled)
        next(iterator)
    assert len(opened) == 1  # the others wait
    orders = [[row["id"] for row in stream(seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(f"q{number}" for number in range(200) if number != 7)
    assert {(row.row, row.id) for row in heard} == {(7, "q7")}


def test_inspecting_a_stream_keeps_no_rows():
    alive = []

    class Row(dict):
        def __init__(self, number: int) -> None:
            super().__init__(problem=f"q{number}", solution="x" if number % 2 else None)
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    most = 0

    class Rows:
        features = None

        def __iter__(self):
            nonlocal most
            for number in range(1000):
                yield Row(number)
                most = max(most, len(alive))

    found = inspect_rows(Rows(), RowOptions(), samples=3)
    assert (found.rows, found.usable, len(found.sample)) == (1000, 500, 3)
    assert most <= 3


def test_a_stream_that_breaks_off_is_a_sentence(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet cannot be read"), readable("a.parquet", "data_files"):
        list(load_split("train", data_files=str(tmp_path / "a.parquet"), streaming=True))


def test_videos_of_a_stream_need_a_model_for_several_images(tmp_path):
    class Tokenizer:
        def apply_chat_template(self, *messages, **options):
            raise ValueError("text only")

    (tmp_path / "a.jsonl").write_text('{"problem": "q", "solution": "x", "videos": ["v.mp4"]}\n')
    for streaming in (True, False):
        flags = DataArguments(data_files=str(tmp_path / "a.jsonl"), dataset_streaming=streaming)
        with pytest.raises(ConfigError, match=r"Tokenizer does not take several \(text only\)"):
            load_rows(flags, "train", needs_solution=True, limit=None, processor=Tokenizer)
