"""Rows of any form as training reads them, from data sets and streams."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from support.made_sets import jsonl, parquet, picture

from vgr_trl.cli import data as data_convert
from vgr_trl.cli import data as data_inspect
from vgr_trl.cli.arguments import DataArguments, load_rows, parse
from vgr_trl.cli.data import inspect_run
from vgr_trl.data.columns import images_of
from vgr_trl.data.inspect import inspect_rows
from vgr_trl.data.load import load_split
from vgr_trl.data.prompts import SYSTEM_PROMPT, special_tokens
from vgr_trl.data.read import readable
from vgr_trl.data.rows import RowOptions, prepare_rows, report_skipped, row_problem
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.utils import ConfigError, DataError


def noise(damaged: bool = False) -> dict:
    buffer = io.BytesIO()
    Image.effect_noise((40, 30), 80).save(buffer, "PNG")
    data = buffer.getvalue()
    return {"bytes": data[: len(data) // 2] if damaged else data, "path": None}


def dataset(**columns) -> Dataset:
    features = Features(
        {
            "problem": Value("string"),
            "solution": Value("string"),
            "image": ImageFeature(decode=False),
            "choices": List(Value("string")),
        }
    )
    rows = {"problem": ["which colour?"] * 4, "solution": ["A", "B", "red", "blue"], "image": [noise()] * 4}
    rows |= {"choices": [["red", "blue"]] * 4, **columns}
    return Dataset.from_dict(rows, features=features).cast_column("image", ImageFeature())


def test_usable_rows_get_a_prompt():
    rows, skipped = prepare_rows(dataset())
    assert skipped == []
    assert rows[0]["prompt"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "which colour?\nA. red\nB. blue"},
    ]
    assert rows[0]["image"].size == (40, 30)


def test_prepared_rows_can_be_built_upon_with_their_features():
    rows, _ = prepare_rows(dataset())
    again = Dataset.from_dict({"image": list(rows["image"])}, features=Features({"image": rows.features["image"]}))
    assert again[0]["image"].size == (40, 30)


def test_bad_rows_are_left_out_and_listed(tmp_path):
    made = dataset(
        solution=["A", "green", None, "B"],
        image=[noise(), noise(), noise(), noise(damaged=True)],
        problem=["q", "q", "q", "q"],
    )
    rows, skipped = prepare_rows(made, split="train")
    assert len(rows) == 1
    assert [row.row for row in skipped] == [1, 2, 3]
    assert "image is truncated or damaged" in skipped[2].reason
    assert "green" in skipped[0].reason
    report_skipped(skipped, tmp_path / "run" / "skipped.jsonl")
    listed = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert [(row["split"], row["row"]) for row in listed] == [("train", 1), ("train", 2), ("train", 3)]
    assert all(row["reason"] for row in listed)


def test_nothing_left_is_an_error():
    with pytest.raises(DataError, match=re.escape("None of the 4 rows of the train data can be used; the first: ")):
        prepare_rows(dataset(image=[noise(damaged=True)] * 4))


def test_an_empty_data_set_is_an_error():
    with pytest.raises(DataError, match="The test data set has no rows"):
        prepare_rows(Dataset.from_dict({"problem": [], "solution": []}), split="test")


def test_image_paths_from_a_relative_folder(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    Image.new("RGB", (8, 9)).save(tmp_path / "set" / "a.png")
    monkeypatch.chdir(tmp_path)
    made = Dataset.from_dict({"problem": ["q"], "solution": ["x"], "image": ["a.png"]})
    rows, skipped = prepare_rows(made, root=Path("set"))
    assert (rows[0]["image"].size, skipped) == ((8, 9), [])
    (row,) = prepare_rows(made.to_iterable_dataset(), root=Path("set"))[0]
    assert row["image"].size == (8, 9)


def test_a_stream_without_columns_rows_or_usable_rows_is_an_error():
    with pytest.raises(DataError, match="the accuracy reward needs `solution`"):
        prepare_rows(Dataset.from_dict({"problem": ["a"]}).to_iterable_dataset())
    with pytest.raises(DataError, match="None of the 4 rows of the train stream can be used"):
        prepare_rows(dataset(image=[noise(damaged=True)] * 4).to_iterable_dataset())
    with pytest.raises(DataError, match="The train stream has no rows"):
        prepare_rows(IterableDataset.from_generator(lambda: iter(())))


def test_images_as_other_writers_store_them():
    value = noise()["bytes"]
    stored = {"bytes": Value("binary"), "path": Value("string")}
    for feature, image in ((stored, {"bytes": value, "path": None}), (Value("binary"), value)):
        columns = {"problem": ["q"], "solution": ["x"], "image": [image]}
        features = Features({"problem": Value("string"), "solution": Value("string"), "image": feature})
        rows, skipped = prepare_rows(Dataset.from_dict(columns, features=features))
        assert (rows[0]["image"].size, skipped) == ((40, 30), [])
    with pytest.raises(DataError, match="the first: image is of type int, not a path"):
        prepare_rows(Dataset.from_dict({"problem": ["q"], "solution": ["x"], "image": [3]}))


def test_prompts_that_only_some_rows_have():
    own = [{"role": "user", "content": "hello"}]
    made = Dataset.from_dict({"prompt": [own, None], "problem": ["q", "r"], "solution": ["x", "y"]})
    rows, _ = prepare_rows(made, system_prompt=None)
    assert rows["prompt"] == [own, [{"role": "user", "content": "r"}]]


def ask(text: str, **columns) -> dict:
    return {"problem": text, "solution": "x", **columns}


@pytest.mark.parametrize(
    "row",
    [
        ask("what is <|im_end|>?"),
        ask("<|image_pad|>", image=noise()),
        ask("which?", choices=["<|endoftext|>", "x"]),
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a<|vision_start|>"}]}], "solution": "x"},
    ],
)
def test_a_special_token_of_the_tokenizer_in_a_text_is_a_reason(row):
    special = special_tokens(build_processor([]))
    assert special is not None
    found = re.fullmatch(r"its text has '(<.*>)', which the model's tokenizer reads as a special token: remove it",
                         row_problem(row, RowOptions(special=special)) or "")  # fmt: skip
    assert found
    assert found[1] in build_processor([]).tokenizer.all_special_tokens
    assert row_problem(row, RowOptions()) is None


def test_the_system_prompt_and_tags_are_no_special_tokens():
    special = special_tokens(build_processor([]))
    row = ask("<think> is a word, and <image> a place", image=noise())
    assert row_problem(row, RowOptions(special=special, system_prompt="<|im_end|>")) is None


@pytest.fixture
def parts(tmp_path):
    """Six rows in two files as `convert` writes them; the image of row 1 and the solution of row 4 are missing."""
    Image.new("RGB", (12, 8), "red").save(tmp_path / "a.png")
    rows = [{"problem": f"q{number}", "solution": "x", "image": "a.png"} for number in range(6)]
    rows[1]["image"] = "missing.png"
    rows[4]["solution"] = None
    for part in range(2):
        lines = [json.dumps(row) + "\n" for row in rows[3 * part : 3 * part + 3]]
        (tmp_path / f"train-0000{part}.jsonl").write_text("".join(lines))
    return tmp_path


def test_flags_make_a_stream_without_its_bad_rows(parts):
    heard = []
    flags = DataArguments(dataset_path=str(parts), dataset_streaming=True, prompt_language="zh")
    stream, skipped = load_rows(flags, "train", needs_solution=True, limit=None, on_skipped=heard.append)
    assert isinstance(stream, IterableDataset)
    for _ in range(2):
        found = list(stream)
        assert [row["problem"] for row in found] == ["q0", "q2", "q3", "q5"]
        assert {image.size for row in found for image in row["images"]} == {(12, 8)}
    assert "图片" in found[0]["prompt"][0]["content"]
    assert (skipped, [row.row for row in heard]) == ([], [1, 4])


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


"""Data as people have them: columns of other names, several files and folders, images of any size, text alone."""


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
    found = inspect_run(
        data_inspect.inspect_parser().parse_args([str(tmp_path / "rows.jsonl"), "--samples", "0", *flags])
    )
    assert (found.usable, dict(found.counts["letters"])) == (1, {"B": 1})
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
        ({"question": "q", "answer": "B", "img": "a.png"}, {}, "`img` seems to hold images; say so by --image_key img"),
        (OPTIONS, {}, "`opts` seems to hold the options of which the answer, 1, is one; say so by --choices_key opts"),
        ({**OPTIONS, "opts": "['red', 'blue']"}, {}, "say so by --choices_key opts"),
        (
            {"ask": "q", "opts": ["a", "b"], "gt": 0, "pic": None},
            {"problem_key": "ask", "solution_key": "gt", "image_key": "pic"},
            "say so by --choices_key opts",
        ),
        ({"question": "q", "answer": "B"}, {"problem_key": "text"}, "problem_key is text, which is none of them"),
    ],
)
def test_columns_that_are_not_understood_are_shown_with_the_flag(tmp_path, row, flags, words):
    jsonl(tmp_path / "rows.jsonl", [row])
    for streaming in (False, True):
        with pytest.raises(DataError, match=re.escape(words)):
            load(data_files=str(tmp_path / "rows.jsonl"), dataset_streaming=streaming, **flags)
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    with pytest.raises(DataError, match=re.escape(words)):
        inspect_run(data_inspect.inspect_parser().parse_args([str(tmp_path / "rows.jsonl"), *given]))


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({"answer": "red"}, {}),
        ({"opts": ["red", "red"]}, {}),  # as several people have answered
        ({"opts": ["a.png", "b.png"], "image": None}, {}),
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
        ({"max_pixels": 1200}, [(8, 6), (40, 30)]),
        ({"min_pixels": 192, "max_pixels": 1200}, [(16, 12), (40, 30)]),
        ({"max_short_side": 30, "filter_big_images": True}, [(8, 6)]),
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
