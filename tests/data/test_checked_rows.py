import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from datasets import Dataset, config
from PIL import Image
from support.made_sets import corners, jsonl, loaded, picture

import vgr_trl
from vgr_trl.cli.arguments import DataArguments, load_rows
from vgr_trl.cli.data import inspect_run, make_parser
from vgr_trl.data.checked_rows import READERS, RowOptions, prepare_rows, ready_row
from vgr_trl.data.images import images_of
from vgr_trl.data.prompts import SIZES, special_tokens
from vgr_trl.data.read_row import read_row
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.errors import DataError

LAYOUTS = yaml.safe_load(Path(__file__).with_name("layouts.yaml").read_text(encoding="utf-8"))
RED, BLUE = (200, 30, 40), (10, 20, 250)
BOTH = pytest.mark.parametrize("streaming", [False, True])
OTHER = {"text": "Which?", "opts": ["red", "blue"], "gold": "B", "img": "red.png", "prompt": "not this", "label_idx": 0}
FLAGS = {"problem_key": "text", "choices_key": "opts", "solution_key": "gold", "image_key": "img", "video_key": "none"}
WAITS = """
import os, time
from pathlib import Path
from datasets import Dataset, Features, Value
from vgr_trl.data.checked_rows import map_rows

def examine(row):
    Path({folder!r}, str(os.getpid())).touch()
    time.sleep(600)

map_rows(Dataset.from_dict({{"n": range(1000)}}), examine, Features(n=Value("int32")), None, "Waiting")
"""


def asked(row: dict[str, Any]) -> str:
    content = row["prompt"][-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


@pytest.fixture
def pictures(tmp_path):
    for name, size, colour in (("red", (8, 6), RED), ("blue", (80, 60), BLUE)):
        Image.new("RGB", size, colour).save(tmp_path / f"{name}.png")
    return tmp_path


def test_a_special_token_of_the_tokenizer_in_a_text_is_a_reason():
    special = special_tokens(build_processor([]))
    parts = [{"type": "text", "text": "a<|vision_start|>"}]
    for row in (
        {"problem": "what is <|im_end|>?"},
        {"problem": "<|image_pad|>", "image": picture()},
        {"problem": "which?", "choices": ["<|endoftext|>", "x"]},
        {"prompt": [{"role": "user", "content": parts}]},
    ):
        with pytest.raises(DataError, match=r"its text has '<.*>', which the model's tokenizer reads as a special tok"):
            ready_row({**row, "solution": "x"}, RowOptions(special=special))
        ready_row({**row, "solution": "x"}, RowOptions())
    row = {"problem": "<think> is a word, and <image> a place", "solution": "x", "image": picture()}
    ready_row(row, RowOptions(special=special, system_prompt="<|im_end|>"))


def test_special_tokens_that_no_template_writes_may_stand_in_a_prompt():
    """Control tokens of a template that was applied before are refused, and messages asked for."""
    processor = build_processor([])
    processor.tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    options = RowOptions(special=special_tokens(processor))
    asked_for = {"role": "user", "content": "Reason within <think></think>."}
    ready_row({"prompt": [asked_for], "solution": "x"}, options)
    applied = processor.apply_chat_template([asked_for], add_generation_prompt=True)
    for row in ({"problem": applied}, {"prompt": applied}):
        with pytest.raises(DataError, match="give messages"):
            ready_row({**row, "solution": "x", "image": picture()}, options)


def test_a_shuffled_stream_waits_with_undecoded_images(pictures):
    lines = [{"id": f"q{number}", "problem": "q", "solution": "x", "image": "red.png"} for number in range(200)]
    lines[7]["image"] = "missing.png"
    flags = DataArguments(data_files=str(jsonl(pictures / "a.jsonl", lines)), dataset_streaming=True)
    heard = []

    def stream(seed):
        return load_rows(flags, "train", needs_solution=True, limit=None, on_skipped=heard.append, shuffle_seed=seed)[0]

    shuffled = stream(0)
    with patch("vgr_trl.data.checked_rows.open_image", return_value=Image.new("RGB", (1, 1))) as opened:
        next(iter(shuffled))
    assert opened.call_count == 1  # the others wait
    orders = [[row["id"] for row in stream(seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(f"q{number}" for number in range(200) if number != 7)
    assert {(row.row, row.id) for row in heard} == {(7, "q7")}


@BOTH
def test_columns_of_other_names(pictures, streaming):
    rows = ["torn", OTHER, {**OTHER, "gold": 0, "img": ["red.png", "blue.png"]}]
    path = jsonl(pictures / "rows.jsonl", rows)
    (first, second), skipped = loaded(dataset_streaming=streaming, data_files=str(path), **FLAGS)
    assert list(skipped) == [0]
    assert {"text", "opts", "gold", "img", "label_idx"}.isdisjoint(first)
    assert asked(first) == asked(second) == "Which?\nA. red\nB. blue"
    assert (first["solution"], second["solution"]) == ("B", 0)
    assert (corners(first), corners(second)) == ([RED], [RED, BLUE])


def test_answers_that_cannot_be_read_stop_the_start_above_a_tenth(pictures):
    right = {"problem": "q", "solution": "x", "image": "red.png"}
    wrong = {**right, "solution": "word " * 30}
    assert list(loaded(data_files=str(jsonl(pictures / "a.jsonl", [right] * 9 + [wrong])))[1]) == [9]
    with pytest.raises(DataError, match="`solution` cannot be read in 2 of the 10 rows of train, such as row 8"):
        loaded(data_files=str(jsonl(pictures / "b.jsonl", [right] * 8 + [wrong] * 2)))


@pytest.mark.parametrize(("row", "words"), LAYOUTS["not understood"])
def test_columns_that_are_not_understood_are_shown_with_the_flag(tmp_path, row, words):
    path = str(jsonl(tmp_path / "rows.jsonl", [row]))
    for streaming in (False, True):
        with pytest.raises(DataError, match=words):
            loaded(data_files=path, dataset_streaming=streaming)
    with pytest.raises(DataError, match=words):
        inspect_run(make_parser().parse_args(["inspect", path]))


@BOTH
def test_paths_start_from_the_folder_of_their_file(tmp_path, streaming):
    for name, colour in (("a", RED), ("b", BLUE)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6), colour).save(tmp_path / name / "x.png")
        jsonl(tmp_path / name / "rows.jsonl", [{"question": name, "answer": "x", "image": "x.png"}])
    Dataset.from_list([{"question": "c", "answer": "x", "image": "x.png"}]).to_parquet(tmp_path / "b" / "c.parquet")
    for second in ("b/rows.jsonl", "b/c.parquet"):
        paths = f"train={tmp_path}/a/rows.jsonl+{tmp_path}/{second}"
        rows, skipped = loaded(data_files=paths, dataset_streaming=streaming)
        assert not skipped
        assert [corners(row) for row in rows] == [[RED], [BLUE]]
        assert "__folder__" not in rows[0]
        rows, _ = loaded(data_files=paths, dataset_streaming=streaming, image_dir=str(tmp_path / "a"))
        assert [corners(row) for row in rows] == [[RED], [RED]]


@BOTH
def test_sizes_of_images(pictures, streaming):
    rows = [{"question": "q", "answer": "x", "image": name} for name in ("red.png", "blue.png")]
    given = {"data_files": str(jsonl(pictures / "rows.jsonl", rows)), "dataset_streaming": streaming}
    for limits, sizes in (
        ({"min_pixels": 192, "max_pixels": 1200}, [(16, 12), (40, 30)]),
        ({"max_short_side": 30, "filter_big_images": True}, [(8, 6), (40, 30)]),
    ):
        assert [images_of(row)[0].size for row in loaded(**given, **limits)[0]] == sizes


@BOTH
def test_long_dialogues_train_on_their_last_question(pictures, streaming):
    turns = [("human", "<image>\nWhat?"), ("gpt", "A shape."), ("human", "Which colour?"), ("gpt", "red")]
    row = {"image": "red.png", "conversations": [{"from": who, "value": text} for who, text in turns]}
    own = {"image": None, "conversations": [{"from": "system", "value": "Be brief."}, *row["conversations"][2:]]}
    path = str(jsonl(pictures / "rows.jsonl", [row, own]))
    (long, short), _ = loaded(data_files=path, dataset_streaming=streaming)
    assert [message["role"] for message in long["prompt"]] == ["system", "user", "assistant", "user"]
    assert "<answer>" in json.dumps(long["prompt"][0])  # the standard system prompt
    assert long["prompt"][1]["content"][0]["type"] == "image"
    assert (asked(long), long["solution"]) == ("Which colour?", "red")
    assert [message["role"] for message in short["prompt"]] == ["system", "user"]
    assert "Be brief." in json.dumps(short["prompt"][0])


def prepared(folder):
    """Questions about one picture, so many that their check is cached, ready for training."""
    rows = [{"problem": f"which {number}?", "image": "red.png", "answer": "red"} for number in range(1000)]
    return prepare_rows(Dataset.from_list(rows), root=folder)[0].with_format(None)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "vgr_trl"


def test_a_changed_image_is_measured_again(pictures, cached):
    for size in (8, 16):
        Image.new("RGB", (size, 8)).save(pictures / "red.png")
        assert prepared(pictures)[999][SIZES] == [[size, 8]]


def test_the_cache_depends_on_every_module_that_reads_rows():
    """Of the modules that importing the check loads, those of `data` and `rewards` that `READERS` does not name."""
    code = "import sys, vgr_trl.data.checked_rows; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    files = {name.removeprefix("vgr_trl.").replace(".", "/") + ".py" for name in loaded if name.startswith("vgr_trl.")}
    root = Path(vgr_trl.__file__).parent
    reading = {file for file in files if file.startswith(("data/", "rewards/"))}
    known = {file.relative_to(root).as_posix() for pattern in READERS for file in root.glob(pattern)}
    assert reading - known == {"rewards/calling.py", "rewards/functions.py", "rewards/loading.py"}
    assert "trainer.py" not in known


@pytest.mark.parametrize("damage", [
    lambda data: data.replace(b"which 7?", b"which 8?"), lambda data: data[:-100], lambda data: b"",
    lambda data: bytes(len(data)),
])  # fmt: skip
def test_a_damaged_cache_is_made_again(pictures, cached, damage):
    prompts = prepared(pictures)["prompt"][:]
    (file,) = cached.iterdir()
    data = file.read_bytes()
    file.unlink()  # the first result still reads it
    file.write_bytes(damage(data))
    assert file.read_bytes() != data
    assert prepared(pictures)["prompt"][:] == prompts
    assert [file.read_bytes() for file in cached.iterdir()] == [data]


def test_a_cache_that_cannot_be_written_is_named_and_not_needed(pictures, cached, caplog):
    cached.parent.write_text("a file where the folder should be")
    assert len(prepared(pictures)) == 1000
    assert f"{cached} cannot be written" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_and_no_file_outlives_a_killed_check(tmp_path, number):
    workers = tmp_path / "workers"
    workers.mkdir()
    given = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", WAITS.format(folder=str(workers))], env=os.environ | given) as process:
        while not any(workers.iterdir()) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
    while any(Path(f"/proc/{worker.name}").exists() for worker in workers.iterdir()):
        time.sleep(0.1)  # for ever, if they stay
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != workers] == []


def test_an_answer_is_needed_only_where_it_is_read():
    with pytest.raises(DataError):
        read_row({"problem": "Which?"})
    read_row({"problem": "Which?"}, needs_answer=False)
    complete = {"prompt": [{"role": "user", "content": "Which?"}], "choices": []}
    assert read_row(complete, needs_answer=False).choices == []


def test_a_reply_in_parts_is_the_answer():
    """The rows of HuggingFaceH4/llava-instruct-mix-vsft."""
    asked, shown = {"type": "text", "text": "How?", "index": None}, {"type": "image", "text": None, "index": 0}
    reply = {"role": "assistant", "content": [{**asked, "text": "7"}]}
    row = {"messages": [{"role": "user", "content": [asked, shown]}, reply], "images": ["a.png"]}
    assert read_row(row).answer == "7"
    reply["content"].append(shown)
    with pytest.raises(DataError):
        read_row(row)


@BOTH
@pytest.mark.parametrize("other", [
    {"image_path": "blue.png"}, {"images": ["blue.png"], "opts": ["red", "blue"], "answer": 1},
])  # fmt: skip
def test_columns_are_checked_in_each_file_before_they_are_joined(pictures, streaming, other):
    first = {"question": "Which?", "answer": "red", "images": ["red.png"]}
    jsonl(pictures / "set" / "a.jsonl", [first])
    jsonl(pictures / "set" / "b.jsonl", [{"question": "Which?", "answer": "blue"} | other])
    text = jsonl(pictures / "set" / "c.jsonl", [{"question": "How many?", "answer": "2"}])
    with pytest.raises(DataError, match="b.jsonl"):
        loaded(dataset_path=str(pictures / "set"), dataset_streaming=streaming)
    words = ["inspect", str(pictures / "set"), *["--dataset_streaming"] * streaming]
    with pytest.raises(DataError, match="b.jsonl"):
        inspect_run(make_parser().parse_args(words))
    jsonl(pictures / "img.jsonl", [{"question": "Which?", "answer": "red", "img": "red.png"}])
    files = f"{pictures / 'img.jsonl'}+{text}"  # a file of text alone has not the column that a flag names
    rows, skipped = loaded(data_files=files, image_key="img", dataset_streaming=streaming, image_dir=str(pictures))
    assert ([corners(row) for row in rows], skipped) == ([[RED], []], {})
