import io
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from PIL import Image as PILImage

from vgr_trl.data.prompts import SYSTEM_PROMPT, special_tokens
from vgr_trl.data.rows import RowOptions, prepare_rows, report_skipped, row_problem
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.utils import DataError


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


def test_a_solution_is_asked_for_where_a_reward_reads_it():
    questions = Dataset.from_dict({"problem": ["a"]})
    with pytest.raises(DataError, match="the accuracy reward needs `solution`"):
        prepare_rows(questions)
    assert len(prepare_rows(questions, needs_solution=False)[0]) == 1


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
    with pytest.raises(DataError, match="the first: image is of type int, not a path"):
        prepare_rows(Dataset.from_dict({"problem": ["q"], "solution": ["x"], "image": [3]}))


def test_prompts_that_only_some_rows_have():
    own = [{"role": "user", "content": "hello"}]
    made = Dataset.from_dict({"prompt": [own, None], "problem": ["q", "r"], "solution": ["x", "y"]})
    rows, _ = prepare_rows(made, system_prompt=None)
    assert rows["prompt"] == [own, [{"role": "user", "content": "r"}]]


def test_more_options_than_letters_is_a_reason_without_an_accuracy_reward_too():
    row = {"problem": "q", "choices": [str(i) for i in range(11)]}
    assert row_problem(row, RowOptions(needs_solution=False)) == "it has 11 options: there must be 2 to 10"


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
                         row_problem(row, RowOptions(special=special)) or "")  # fmt: skip
    assert found
    assert found[1] in build_processor([]).tokenizer.all_special_tokens
    assert row_problem(row, RowOptions()) is None


def test_the_system_prompt_and_tags_are_no_special_tokens():
    special = special_tokens(build_processor([]))
    row = ask("<think> is a word, and <image> a place", image=png())
    assert row_problem(row, RowOptions(special=special, system_prompt="<|im_end|>")) is None
