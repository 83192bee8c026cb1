import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from datasets import load_dataset
from PIL import Image
from support.made_sets import encoded, jsonl, picture, rows_in, skipped_in, written

from vgr_trl.data import merge as merge_module
from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.convert import Output
from vgr_trl.data.merge import MergeOptions, merge
from vgr_trl.data.read import Source
from vgr_trl.utils import ConfigError, DataError

CHOICES = ["red", "blue", "green"]


def question(name: str, colour, problem="Which colour?", solution="A", choices=CHOICES, images=None) -> Question:
    return Question(name, name[0], problem, solution, images or [picture(colour)], choices)


def made_set(folder, questions, **options) -> Source:
    written([(Origin("file", number), item) for number, item in enumerate(questions)], folder, **options)
    return Source(dataset_path=str(folder))


def two_sets(tmp_path) -> list[Source]:
    """30 rows in two files, and 10 with several images, one of which is that of row 0 of the first set."""
    first = [question(f"a{number}", (number, 0, 0), solution="ABC"[number % 3]) for number in range(30)]
    second = [
        question(
            f"b{number}",
            None,
            images=[picture((number, 0, 0) if number == 0 else (0, number, 0)), picture((0, 0, number))],
        )
        for number in range(10)
    ]
    return [made_set(tmp_path / "a", first, rows_per_file=20), made_set(tmp_path / "b", second, several_images=True)]


def merged(tmp_path, sources, *, name="out", identity="same", kind="parquet", **options):
    output = Output(tmp_path / name, workers=0, kind=kind)
    return merge(sources, output, MergeOptions(**options), identity)


def bytes_of(row) -> set[bytes]:
    return {image["bytes"] for image in row["images"]}


def test_two_sets_become_one_that_datasets_reads(tmp_path):
    plan = merged(tmp_path, two_sets(tmp_path))
    train, test = rows_in(tmp_path / "out"), rows_in(tmp_path / "out", "test")
    assert (len(train), len(test)) == (36, 4)
    assert sorted(row["id"] for row in train + test) == sorted(
        [f"a{n}" for n in range(30)] + [f"b{n}" for n in range(10)]
    )
    assert not set().union(*map(bytes_of, train)) & set().union(*map(bytes_of, test))
    assert (plan.several_images, plan.videos, plan.surplus, list(plan.left_out)) == (True, False, 0, [])
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in loaded.items()} == {"train": 36, "test": 4}
    by_id = {row["id"]: row for row in loaded["train"]} | {row["id"]: row for row in loaded["test"]}
    assert by_id["a7"]["images"][0].getpixel((0, 0)) == (7, 0, 0)
    assert [image.getpixel((0, 0)) for image in by_id["b5"]["images"]] == [(0, 5, 0), (0, 0, 5)]
    assert (by_id["a7"]["solution"], by_id["a7"]["choices"]) == ("B", CHOICES)


def test_sets_of_one_image_stay_so(tmp_path):
    merged(tmp_path, two_sets(tmp_path)[:1], test_share=0)
    assert [row["image"]["bytes"] is not None for row in rows_in(tmp_path / "out")] == [True] * 30
    assert not list((tmp_path / "out").glob("test-*"))


def test_the_same_image_in_another_format_is_the_same(tmp_path):
    """The duplicate is a WEBP without loss; the contradiction differs in case and white space; both are listed."""
    image = Image.effect_noise((20, 20), 90).convert("RGB")
    png, webp = ({"bytes": encoded(image, kind, lossless=True), "path": None} for kind in ("PNG", "WEBP"))
    first = made_set(
        tmp_path / "a", [question("a0", None, images=[png]), question("a1", (1, 1, 1)), question("a2", (2, 2, 2))]
    )
    second = made_set(
        tmp_path / "b",
        [
            question("b0", None, images=[webp]),
            question("b1", (1, 1, 1), problem=" which  COLOUR?", solution="B"),
            question("b2", (2, 2, 2), problem="How many?"),
        ],
    )
    merged(tmp_path, [first, second], test_share=0)
    assert [row["id"] for row in rows_in(tmp_path / "out")] == ["a0", "b2", "a2"]
    other = "another row with the same image and question has another answer"
    file_a, file_b = (str(tmp_path / name / "train-00000.parquet") for name in "ab")
    assert skipped_in(tmp_path / "out") == [
        {"file": file_b, "row": 0, "reason": "it has the same image and question as an earlier row"},
        {"file": file_a, "row": 1, "reason": other},
        {"file": file_b, "row": 1, "reason": other},
    ]


def test_weights_leave_rows_out_and_say_how_many(tmp_path):
    plan = merged(tmp_path, two_sets(tmp_path), weights=(1, 2), test_share=0)
    assert Counter(row["source"] for row in rows_in(tmp_path / "out")) == {"a": 5, "b": 10}
    assert plan.surplus == 25


def test_letters_are_balanced(tmp_path):
    rows = [question(f"a{number}", (number, 0, 0)) for number in range(30)]
    merged(tmp_path, [made_set(tmp_path / "a", rows)], test_share=0, shuffle_choices=True)
    found = rows_in(tmp_path / "out")
    assert Counter(row["solution"] for row in found) == {"A": 10, "B": 10, "C": 10}
    assert {row["choices"]["ABC".index(row["solution"])] for row in found} == {"red"}


def test_a_merge_that_is_killed_is_continued(tmp_path, monkeypatch):
    sources = two_sets(tmp_path)
    merged(tmp_path, sources, name="plain", shuffle_choices=True)

    def dying(candidates, output, *rest):
        if output.split == "test":
            raise KeyboardInterrupt
        return convert(candidates, output, *rest)

    convert = merge_module.convert
    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "convert", dying)
        with pytest.raises(KeyboardInterrupt):
            merged(tmp_path, sources, shuffle_choices=True)
    assert not list((tmp_path / "out").glob("test-*"))
    monkeypatch.setattr(merge_module, "make_plan", lambda *_: pytest.fail("looked at the rows again"))
    merged(tmp_path, sources, shuffle_choices=True)
    for split in ("train", "test"):
        assert rows_in(tmp_path / "out", split) == rows_in(tmp_path / "plain", split)


def test_another_merge_is_refused(tmp_path):
    sources = two_sets(tmp_path)
    merged(tmp_path, sources)
    with pytest.raises(ConfigError, match="holds a merge of other sets, or with other options"):
        merged(tmp_path, sources, identity="another")
    (tmp_path / "out" / ".merge.json").write_text("[")
    with pytest.raises(ConfigError, match="merge.json cannot be read"):
        merged(tmp_path, sources)


def test_videos_are_carried_on_and_tell_rows_apart(tmp_path):
    (tmp_path / "one.mp4").write_bytes(b"one")
    (tmp_path / "two.mp4").write_bytes(b"two")
    (tmp_path / "copy.mp4").write_bytes(b"one")
    names = ["one.mp4", "two.mp4", "copy.mp4"]
    rows = [{"prompt": "What?", "answer": "x", "videos": [name], "id": name} for name in names]
    source = Source(data_files=[str(jsonl(tmp_path / "mine.jsonl", rows))])
    plan = merged(tmp_path, [source], test_share=0.5)
    found = rows_in(tmp_path / "out") + rows_in(tmp_path / "out", "test")
    assert plan.videos
    assert {row["id"]: row["videos"] for row in found} == {name: [str(tmp_path / name)] for name in names[:2]}
    assert all(row["images"] == [] for row in found)
    assert [found["reason"] for found in skipped_in(tmp_path / "out")] == [
        "it has the same image and question as an earlier row"
    ]


def test_regions_are_carried_on_in_the_form_of_converted_sets(tmp_path):
    """The image is 12x8: 3 of 12 and 4 of 8 pixels are 0.25 and 0.5 of it; a set without regions has empty lists."""
    Image.new("RGB", (12, 8), (1, 2, 3)).save(tmp_path / "one.png")
    Image.new("RGB", (12, 8), (3, 2, 1)).save(tmp_path / "two.png")
    Image.new("RGB", (12, 8), (2, 3, 1)).save(tmp_path / "bad.png")
    rows = [
        {"id": "pixels", "prompt": "What?", "answer": "x", "image": "one.png", "regions": [[3, 4, 6, 2]]},
        {"id": "corners", "prompt": "What?", "answer": "x", "image": "two.png", "bbox": [0.25, 0.5, 0.75, 1]},
        {"id": "bad", "prompt": "What?", "answer": "x", "image": "bad.png", "bbox": [0.75, 0.5, 0.25, 1]},
    ]
    with_boxes = [replace(question("c0", (9, 9, 9)), regions=[[0.5, 0, 0.25, 1]])]
    sources = [
        Source(data_files=[str(jsonl(tmp_path / "mine.jsonl", rows))]),
        made_set(tmp_path / "c", with_boxes, regions=True),
        made_set(tmp_path / "d", [question("d0", (8, 8, 8))]),
    ]
    merged(tmp_path, sources, test_share=0)
    found = {row["id"]: row["regions"] for row in rows_in(tmp_path / "out")}
    assert found == {
        "pixels": [[0.25, 0.5, 0.5, 0.25]],
        "corners": [[0.25, 0.5, 0.5, 0.5]],
        "c0": [[0.5, 0, 0.25, 1]],
        "d0": [],
    }
    (left_out,) = skipped_in(tmp_path / "out")
    assert (left_out["row"], "in its column bbox: give left, top, right and bottom" in left_out["reason"]) == (2, True)
    merged(tmp_path, sources[2:], name="none", test_share=0)
    assert "regions" not in rows_in(tmp_path / "none")[0]


def test_a_set_as_jsonl(tmp_path):
    merged(tmp_path, two_sets(tmp_path), kind="jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out" / "train-00000.jsonl").read_text().splitlines()]
    assert len(lines) == 36
    assert all((tmp_path / "out" / image).is_file() for line in lines for image in line["images"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test_share": 1}, "test_share is 1: give a number from 0 (no split) up to below 1"),
        ({"test_share": -0.1}, "test_share is -0.1"),
        ({"test_share": float("nan")}, "test_share is nan"),
        ({"weights": (1, 0)}, "weights is [1, 0]: give a number above 0 for each set"),
        ({"weights": (float("nan"), 1)}, "weights is [nan, 1]"),
        ({"weights": (float("inf"), 1)}, "weights is [inf, 1]"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        MergeOptions(**options)


def test_what_cannot_be_merged(tmp_path):
    source = made_set(tmp_path / "a", [question("a0", (1, 1, 1))])
    with pytest.raises(ConfigError, match=re.escape("weights has 2 numbers for 1 sets: give one for each.")):
        merged(tmp_path, [source], weights=(1, 1))
    with pytest.raises(DataError, match="The 1 rows cannot be split"):
        merged(tmp_path, [source])
    against = made_set(tmp_path / "b", [question("b0", (1, 1, 1), solution="B")])
    with pytest.raises(DataError, match="None of the 2 rows is left: another row with the same image and question"):
        merged(tmp_path, [source, against])
    bad = Source(data_files=[str(jsonl(tmp_path / "bad.jsonl", [{"prompt": "q", "answer": "a", "image": ""}]))])
    with pytest.raises(DataError, match="None of the 1 rows can be used; the first: image is an empty text"):
        merged(tmp_path, [bad])
    assert not (tmp_path / "out").exists()
