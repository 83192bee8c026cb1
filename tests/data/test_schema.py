import io
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, IterableDataset, List, Value, load_dataset
from PIL import Image as PILImage

from vgr_trl.data.rows.schema import prepare_rows, row_problem
from vgr_trl.data.rows.skipped import report_skipped
from vgr_trl.data.rows.text.prompts import SYSTEM_PROMPT, build_prompt
from vgr_trl.data.rows.text.special import special_tokens
from vgr_trl.demo.tiny_processor import build_processor
from vgr_trl.errors import DataError


def png(damaged: bool = False) -> dict:
    buffer = io.BytesIO()
    PILImage.effect_noise((40, 30), 80).save(buffer, "PNG")
    data = buffer.getvalue()
    return {"bytes": data[: len(data) // 2] if damaged else data, "path": None}


def dataset(**columns) -> Dataset:
    features = Features(
        {
            "problem": Value("string"),
            "solution": Value("string"),
            "image": Image(decode=False),
            "choices": List(Value("string")),
        }
    )
    rows = {"problem": ["which colour?"] * 4, "solution": ["A", "B", "red", "blue"], "image": [png()] * 4}
    rows |= {"choices": [["red", "blue"]] * 4, **columns}
    return Dataset.from_dict(rows, features=features).cast_column("image", Image())


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


def test_a_prompt_of_the_rows_own_is_kept():
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hello"}]], "solution": ["hi"]})
    prepared, _ = prepare_rows(rows)
    assert prepared["prompt"][0] == [{"role": "user", "content": "hello"}]


def test_bad_rows_are_left_out_and_listed(tmp_path):
    made = dataset(
        solution=["A", "green", None, "B"], image=[png(), png(), png(), png(damaged=True)], problem=["q", "q", "q", "q"]
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
        prepare_rows(dataset(image=[png(damaged=True)] * 4))


def test_an_empty_data_set_is_an_error():
    with pytest.raises(DataError, match="The test data set has no rows"):
        prepare_rows(Dataset.from_dict({"problem": [], "solution": []}), split="test")


def test_missing_columns_are_named():
    with pytest.raises(DataError, match=re.escape("has the columns `text` ('a'): it needs `prompt`, or `problem`")):
        prepare_rows(Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(DataError, match="the accuracy reward needs `solution`"):
        prepare_rows(Dataset.from_dict({"problem": ["a"]}))
    rows, _ = prepare_rows(Dataset.from_dict({"problem": ["a"]}), needs_solution=False)
    assert len(rows) == 1


def test_image_paths_as_jsonl_has_them(tmp_path):
    PILImage.new("RGB", (8, 9)).save(tmp_path / "a.png")
    made = Dataset.from_dict({"problem": ["q", "q"], "solution": ["x", "y"], "image": ["a.png", "missing.png"]})
    rows, skipped = prepare_rows(made, root=tmp_path)
    assert rows[0]["image"].size == (8, 9)
    assert len(skipped) == 1
    assert skipped[0].reason.endswith("missing.png does not exist")
    lists = Dataset.from_dict({"problem": ["q"], "solution": ["x"], "images": [["a.png", "a.png"]]})
    rows, _ = prepare_rows(lists, root=tmp_path)
    assert [image.size for image in rows[0]["images"]] == [(8, 9), (8, 9)]


def test_image_paths_from_a_relative_folder(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    PILImage.new("RGB", (8, 9)).save(tmp_path / "set" / "a.png")
    monkeypatch.chdir(tmp_path)
    made = Dataset.from_dict({"problem": ["q"], "solution": ["x"], "image": ["a.png"]})
    rows, skipped = prepare_rows(made, root=Path("set"))
    assert (rows[0]["image"].size, skipped) == ((8, 9), [])
    (row,) = prepare_rows(made.to_iterable_dataset(), root=Path("set"))[0]
    assert row["image"].size == (8, 9)


def test_rows_without_image_among_rows_with_one_are_kept():
    rows, skipped = prepare_rows(dataset(image=[png(), None, png(), None]))
    assert (len(rows), skipped) == (4, [])


def test_a_stream_is_checked_as_it_is_read():
    made = dataset(solution=["A", "green", "B", "A"], image=[png(), png(), png(), png()])
    stream, skipped = prepare_rows(made.to_iterable_dataset(), system_prompt=None)
    rows = list(stream)
    assert skipped == []
    assert [row["solution"] for row in rows] == ["A", "B", "A"]
    assert rows[0]["prompt"] == build_prompt("which colour?", ["red", "blue"], system_prompt=None)


@pytest.mark.parametrize("row", [{}, {"problem": "  "}, {"prompt": []}, {"problem": None, "prompt": None}])
def test_a_row_without_a_question(row):
    assert re.fullmatch(
        r"its (prompt \(or problem or question\)|problem) is (None|\[\]|'  '): it must be a text",
        row_problem({**row, "solution": "x"}) or "",
    )


def test_a_stream_with_a_damaged_image_leaves_that_row_out_and_names_it_once():
    made = dataset(image=[png(), png(damaged=True), png(), png()])
    heard = []
    stream, _ = prepare_rows(made.to_iterable_dataset(), on_skipped=heard.append)
    for _ in range(2):
        assert [row["image"].size for row in stream] == [(40, 30)] * 3
    assert [(row.row, row.split) for row in heard] == [(1, "train")]
    assert "truncated or damaged" in heard[0].reason


def test_a_stream_of_image_paths_is_decoded(tmp_path):
    PILImage.new("RGB", (8, 9)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"problem": "q", "solution": "x", "image": "a.png"}\n' * 2)
    raw = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train", streaming=True)
    stream, _ = prepare_rows(raw, root=tmp_path)
    assert [row["image"].size for row in stream] == [(8, 9), (8, 9)]


def test_a_stream_without_columns_rows_or_usable_rows_is_an_error():
    with pytest.raises(DataError, match="the accuracy reward needs `solution`"):
        prepare_rows(Dataset.from_dict({"problem": ["a"]}).to_iterable_dataset())
    with pytest.raises(DataError, match="None of the 4 rows of the train stream can be used"):
        prepare_rows(dataset(image=[png(damaged=True)] * 4).to_iterable_dataset())
    with pytest.raises(DataError, match="The train stream has no rows"):
        prepare_rows(IterableDataset.from_generator(lambda: iter(())))


def test_images_as_other_writers_store_them():
    value = png()["bytes"]
    stored = {"bytes": Value("binary"), "path": Value("string")}
    for feature, image in ((stored, {"bytes": value, "path": None}), (Value("binary"), value)):
        columns = {"problem": ["q"], "solution": ["x"], "image": [image]}
        features = Features({"problem": Value("string"), "solution": Value("string"), "image": feature})
        rows, skipped = prepare_rows(Dataset.from_dict(columns, features=features))
        assert (rows[0]["image"].size, skipped) == ((40, 30), [])
    with pytest.raises(DataError, match="the first: image is of type int, not an image, a path or bytes"):
        prepare_rows(Dataset.from_dict({"problem": ["q"], "solution": ["x"], "image": [3]}))


def test_a_missing_image_within_a_list_is_a_reason(tmp_path):
    PILImage.new("RGB", (8, 9)).save(tmp_path / "a.png")
    made = Dataset.from_dict({"problem": ["q", "r"], "solution": ["x", "y"], "images": [["a.png", None], ["a.png"]]})
    rows, skipped = prepare_rows(made, root=tmp_path)
    assert (len(rows), [row.row for row in skipped]) == (1, [0])


def test_prompts_that_only_some_rows_have():
    own = [{"role": "user", "content": "hello"}]
    made = Dataset.from_dict({"prompt": [own, None], "problem": ["q", "r"], "solution": ["x", "y"]})
    rows, _ = prepare_rows(made, system_prompt=None)
    assert rows["prompt"] == [own, [{"role": "user", "content": "r"}]]


def test_a_text_prompt_is_a_question():
    made = Dataset.from_dict({"prompt": ["look", "see"], "solution": ["x", "y"]})
    rows, _ = prepare_rows(made, system_prompt=None)
    assert rows["prompt"][1] == [{"role": "user", "content": "see"}]


def test_more_options_than_letters_is_a_reason_without_an_accuracy_reward_too():
    row = {"problem": "q", "choices": [str(i) for i in range(11)]}
    assert row_problem(row, needs_solution=False) == "it has 11 options: there must be 2 to 10"


def ask(text: str, **columns) -> dict:
    return {"problem": text, "solution": "x", **columns}


@pytest.mark.parametrize(
    "row",
    [
        ask("what is <|im_end|>?"),
        ask("<|image_pad|>", image=png()),
        ask("which?", choices=["<|endoftext|>", "x"]),
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a<|vision_start|>"}]}], "solution": "x"},
    ],
)
def test_a_special_token_of_the_tokenizer_in_a_text_is_a_reason(row):
    special = special_tokens(build_processor([]))
    assert special is not None
    found = re.fullmatch(r"its text has '(<.*>)', which the model's tokenizer reads as a special token: take it out",
                         row_problem(row, special=special) or "")  # fmt: skip
    assert found
    assert found[1] in build_processor([]).tokenizer.all_special_tokens
    assert row_problem(row) is None


def test_the_system_prompt_and_tags_are_no_special_tokens():
    special = special_tokens(build_processor([]))
    row = ask("<think> is a word, and <image> a place", image=png())
    assert row_problem(row, special=special, system_prompt="<|im_end|>") is None
