"""Data as people have them: columns of other names, several files and folders, images of any size, text alone."""

import json
import re
from typing import Any

import pytest
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from support.made_sets import jsonl, parquet, picture

from vgr_trl.cli import data as data_convert
from vgr_trl.cli import data as data_inspect
from vgr_trl.cli.arguments import DataArguments, parse
from vgr_trl.cli.data import inspect_run as inspect_rows
from vgr_trl.cli.loading import load_rows
from vgr_trl.data.columns import images_of
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.utils import ConfigError, DataError

RED, BLUE = (200, 30, 40), (10, 20, 250)


def load(split: str = "train", needs_solution: bool = True, **flags: Any) -> tuple[list[dict[str, Any]], list[str]]:
    heard: list[Any] = []
    rows, skipped = load_rows(
        DataArguments(**flags),
        split,
        needs_solution=needs_solution,
        limit=None,
        on_skipped=heard.append,
        processor=lambda: build_processor([]),
    )
    found = list(rows)
    return found, [row.reason for row in [*heard, *skipped]]


def asked(row: dict[str, Any]) -> str:
    content = row["prompt"][-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


def corner(image: Image.Image) -> Any:
    return image.getpixel((0, 0))


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (8, 6), RED).save(folder / "red.png")
    Image.new("RGB", (80, 60), BLUE).save(folder / "blue.png")
    return folder


OTHER = {"text": "Which?", "opts": ["red", "blue"], "gold": "B", "img": "red.png", "prompt": "not this", "label_idx": 0}
FLAGS = {"problem_key": "text", "choices_key": "opts", "solution_key": "gold", "image_key": "img"}


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_other_names(tmp_path, pictures, streaming):
    jsonl(tmp_path / "rows.jsonl", [OTHER, {**OTHER, "gold": 0, "img": ["red.png", "blue.png"]}])
    flags = {**FLAGS, "image_dir": str(pictures), "data_files": str(tmp_path / "rows.jsonl")}
    (first, second), skipped = load(dataset_streaming=streaming, **flags)
    assert not skipped
    assert asked(first) == asked(second) == "Which?\nA. red\nB. blue"
    assert (first["solution"], second["solution"]) == ("B", 0)
    assert [corner(image) for image in second["images"]] == [RED, BLUE]
    assert len(images_of(first)) == 1


def test_inspect_and_convert_take_the_same_flags(tmp_path, pictures, capsys):
    jsonl(tmp_path / "rows.jsonl", [OTHER])
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", value)] + ["--image_dir", str(pictures)]
    found = inspect_rows(
        data_inspect.inspect_parser().parse_args([str(tmp_path / "rows.jsonl"), "--samples", "0", *flags])
    )
    assert (found.usable, dict(found.counts.letters)) == (1, {"B": 1})
    out = ["--data_files", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out"), "--workers", "0"]
    data_convert.convert_run(data_convert.convert_parser().parse_args(["jsonl", *out, *flags]))
    (row,), _ = load(dataset_path=str(tmp_path / "out"))
    assert (asked(row), row["solution"], corner(images_of(row)[0])) == ("Which?\nA. red\nB. blue", "B", RED)


def test_a_named_column_of_images_in_a_table(tmp_path):
    features = Features(
        {"q": Value("string"), "a": Value("string"), "picture": ImageFeature(), "image": Value("string")}
    )
    rows = {"q": ["Which?"], "a": ["x"], "picture": [Image.new("RGB", (8, 6), BLUE)], "image": ["caption"]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    flags = {"data_files": str(tmp_path / "rows.parquet"), "problem_key": "q", "solution_key": "a"}
    for streaming in (False, True):
        (row,), _ = load(dataset_streaming=streaming, image_key="picture", **flags)
        assert [corner(image) for image in images_of(row)] == [BLUE]
        (row,), _ = load(dataset_streaming=streaming, image_key="none", **flags)
        assert images_of(row) == []


OPTIONS = {"question": "Which?", "answer": 1, "opts": ["red", "blue"]}


@pytest.mark.parametrize(
    ("row", "flags", "words"),
    [
        ({"text": "Which?", "gold": "B"}, {}, "the columns `text` ('Which?'), `gold` ('B'): it needs `prompt`"),
        ({"text": "Which?", "gold": "B"}, {}, "say which one holds the question by --problem_key"),
        ({"question": "Which?", "gold": "B"}, {}, "say which one holds it by --solution_key"),
        ({"question": "q", "answer": "B", "img": "a.png"}, {}, "`img` seems to hold images; say so by --image_key img"),
        ({"question": "q", "answer": "B", "imgs": ["a.png"]}, {}, "or train on the text alone by --image_key none"),
        (OPTIONS, {}, "`opts` seems to hold the options of which the answer, 1, is one; say so by --choices_key opts"),
        ({**OPTIONS, "answer": "1"}, {}, "or train on open questions by --choices_key none"),
        ({**OPTIONS, "opts": "['red', 'blue']"}, {}, "say so by --choices_key opts"),
        (
            {"ask": "q", "opts": ["a", "b"], "gt": 0, "pic": None},
            {"problem_key": "ask", "solution_key": "gt", "image_key": "pic"},
            "say so by --choices_key opts",
        ),
        ({"question": "q", "answer": "B"}, {"problem_key": "text"}, "problem_key is text, which is none of them"),
        ({"question": "q", "answer": "B"}, {"image_key": "img"}, "image_key is img, which is none of them"),
    ],
)
def test_columns_that_are_not_understood_are_shown_with_the_flag(tmp_path, row, flags, words):
    jsonl(tmp_path / "rows.jsonl", [row])
    for streaming in (False, True):
        with pytest.raises(DataError, match=re.escape(words)):
            load(data_files=str(tmp_path / "rows.jsonl"), dataset_streaming=streaming, **flags)
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    with pytest.raises(DataError, match=re.escape(words)):
        inspect_rows(data_inspect.inspect_parser().parse_args([str(tmp_path / "rows.jsonl"), *given]))


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({"answer": "red"}, {}),
        ({"answer": 3}, {}),
        ({"opts": ["red", "red"]}, {}),  # as several people have answered
        ({"opts": [1, 2]}, {}),
        ({"opts": ["a.png", "b.png"], "image": None}, {}),
        ({"choices": None}, {}),
        ({}, {"choices_key": "none"}),
    ],
)
def test_a_list_that_holds_no_options(tmp_path, changed, flags):
    jsonl(tmp_path / "rows.jsonl", [{**OPTIONS, **changed}])
    (row,), _ = load(data_files=str(tmp_path / "rows.jsonl"), **flags)
    assert asked(row) == "Which?"


@pytest.mark.parametrize("streaming", [False, True])
def test_paths_start_from_the_folder_of_their_file(tmp_path, streaming):
    for name, colour in (("a", RED), ("b", BLUE)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6), colour).save(tmp_path / name / "x.png")
        jsonl(tmp_path / name / "rows.jsonl", [{"question": name, "answer": "x", "image": "x.png"}])
    Dataset.from_list([{"question": "c", "answer": "x", "image": "x.png"}]).to_parquet(tmp_path / "b" / "c.parquet")
    for files, colours in (("a/rows.jsonl+b/rows.jsonl", [RED, BLUE]), ("a/rows.jsonl+b/c.parquet", [RED, BLUE])):
        paths = "+".join(str(tmp_path / name) for name in files.split("+"))
        rows, skipped = load(data_files=f"train={paths}", dataset_streaming=streaming)
        assert not skipped
        assert [corner(images_of(row)[0]) for row in rows] == colours
        assert "__folder__" not in rows[0]
        rows, _ = load(data_files=f"train={paths}", dataset_streaming=streaming, image_dir=str(tmp_path / "a"))
        assert [corner(images_of(row)[0]) for row in rows] == [RED, RED]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({}, [(8, 6), (80, 60)]),
        ({"max_short_side": 30}, [(8, 6), (40, 30)]),
        ({"max_short_side": 0}, [(8, 6), (80, 60)]),
        ({"max_pixels": 1200}, [(8, 6), (40, 30)]),
        ({"min_pixels": 192, "max_pixels": 1200}, [(16, 12), (40, 30)]),
        ({"max_short_side": 30, "filter_big_images": True}, [(8, 6)]),
        ({"filter_big_images": True}, [(8, 6), (80, 60)]),
    ],
)
def test_sizes_of_images(tmp_path, pictures, flags, sizes, streaming):
    rows = [{"question": "q", "answer": "x", "image": name} for name in ("red.png", "blue.png")]
    given = {"data_files": str(jsonl(pictures / "rows.jsonl", rows)), "dataset_streaming": streaming, **flags}
    found, skipped = load(**given)
    assert [images_of(row)[0].size for row in found] == sizes
    assert len(skipped) == 2 - len(sizes)
    if skipped:
        assert skipped[0] == "image has size 80x60, which filter_big_images leaves out: at most 40x30 of that shape"


def test_impossible_sizes_and_folders_are_refused():
    for flags, words in (
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"min_pixels": 100, "max_pixels": 50}, "min_pixels is 100, but"),
        ({"image_dir": "nowhere"}, "image_dir is nowhere, which is not a folder"),
        ({"solution_key": ""}, "solution_key is '': give the name of a column"),
    ):
        with pytest.raises(ConfigError, match=words):
            DataArguments(**flags)


def test_the_flag_of_files_may_be_given_again(tmp_path):
    for given in (
        ["--data_files", "train=a", "--data_files", "train=b", "--image_key", "x"],
        ["--data_files=train=a", "--image_key", "x", "--data_files=train=b"],
        ["--data_files", "train=a", "train=b", "--image_key", "x"],
    ):
        (data,) = parse((DataArguments,), "train", given)
        assert (data.data_files, data.image_key) == ("train=a,train=b", "x")
    (tmp_path / "c.yaml").write_text("data_files: [train=a, train=b]\n")
    (data,) = parse((DataArguments,), "train", ["--config", str(tmp_path / "c.yaml")])
    assert data.data_files == "train=a,train=b"


def test_long_dialogues_train_on_their_last_question(tmp_path):
    turns = [("human", "<image>\nWhat?"), ("gpt", "A shape."), ("human", "Which colour?"), ("gpt", "red")]
    Image.new("RGB", (8, 6), RED).save(tmp_path / "red.png")
    row = {"image": "red.png", "conversations": [{"from": who, "value": text} for who, text in turns]}
    own = {"image": None, "conversations": [{"from": "system", "value": "Be brief."}, *row["conversations"][2:]]}
    for streaming in (False, True):
        path = str(jsonl(tmp_path / "rows.jsonl", [row, own]))
        (long, short), _ = load(data_files=path, dataset_streaming=streaming)
        assert [message["role"] for message in long["prompt"]] == ["system", "user", "assistant", "user"]
        assert "<answer>" in json.dumps(long["prompt"][0])  # the standard system prompt
        assert json.loads(json.dumps(long["prompt"][1]["content"]))[0] == {"type": "image"}
        assert (asked(long), long["solution"]) == ("Which colour?", "red")
        assert [message["role"] for message in short["prompt"]] == ["system", "user"]
        assert "Be brief." in json.dumps(short["prompt"][0])


ARXIVQA = "openbmb/VisRAG-Ret-Test-ArxivQA"


@pytest.fixture
def arxivqa(tmp_path, monkeypatch):
    """The three tables of ArxivQA, in a folder of the hub's name, which `datasets` takes for the hub's."""
    monkeypatch.chdir(tmp_path)
    asked = {"query": "Which?", "options": ["A) red", "B) blue"]}
    tables = {
        "corpus": [{"corpus-id": "a", "image": picture(RED)}, {"corpus-id": "b", "image": picture(BLUE)}],
        "queries": [{"query-id": "1", **asked, "answer": "B"}, {"query-id": "2", **asked, "answer": "E"}],
        "qrels": [{"query-id": "1", "corpus-id": "b", "score": 1}, {"query-id": "2", "corpus-id": "a", "score": 1}],
    }
    for name, rows in tables.items():
        parquet(tmp_path / ARXIVQA / name / "train-00000-of-00001.parquet", rows)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in tables)
    (tmp_path / ARXIVQA / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    files = ",".join(f"{name}={ARXIVQA}/{name}/train-00000-of-00001.parquet" for name in tables)
    return {"dataset_name": ARXIVQA}, {"dataset_path": str(tmp_path / ARXIVQA)}, {"data_files": files}


@pytest.mark.parametrize("streaming", [False, True])
def test_arxivqa_as_on_the_hub(arxivqa, streaming):
    for given in arxivqa:
        (row,), skipped = load(dataset_streaming=streaming, **given)
        assert (asked(row), row["solution"], corner(images_of(row)[0])) == ("Which?\nA. red\nB. blue", "B", BLUE)
        assert [reason.startswith("solution is the letter E") for reason in skipped] == [True]
        with pytest.raises(DataError, match=r"has the splits \['train'\], but not 'test'"):
            load("test", **given)


def test_inspect_reads_arxivqa(arxivqa, capsys):
    found = inspect_rows(data_inspect.inspect_parser().parse_args([arxivqa[1]["dataset_path"], "--samples", "0"]))
    assert (found.rows, found.usable) == (2, 1)


def test_mmmu_pro_as_on_the_hub(tmp_path, monkeypatch):
    """Its configuration is that of `convert` where none is named."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "MMMU" / "MMMU_Pro"
    row = {"id": "x", "question": "Is <image 2>?", "options": "['red', 'blue']", "answer": "A", "subject": "Art"}
    shown = {f"image_{number}": picture(RED if number == 2 else BLUE) for number in (1, 2)}
    parquet(
        folder / "ten" / "test-00000.parquet", [{**row, **shown}, {**row, "image_1": None, "image_2": shown["image_2"]}]
    )
    parquet(folder / "vision" / "test-00000.parquet", [{**row, "image": picture(BLUE)}])
    configs = {"standard (10 options)": "ten", "vision": "vision"}
    lines = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {place}/*.parquet\n"
        for name, place in configs.items()
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")
    for streaming in (False, True):
        rows, skipped = load("test", dataset_name="MMMU/MMMU_Pro", dataset_streaming=streaming)
        assert not skipped
        assert [asked(found).splitlines()[0] for found in rows] == ["Is <image 2>?", "Is <image 1>?"]
        assert [[corner(image) for image in images_of(found)] for found in rows] == [[BLUE, RED], [RED]]
