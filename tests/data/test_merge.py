from collections import Counter

import pytest
from datasets import load_dataset
from PIL import Image
from support.made_sets import encoded, jsonl, picture, rows_in, skipped_in, written

from vgr_trl.cli.__main__ import main
from vgr_trl.data.convert import split_by_image
from vgr_trl.errors import DataError
from vgr_trl.rewards.answers import resolve_solution

CHOICES = ["red", "blue", "green"]


def question(name, colour, problem="Which colour?", solution="A", choices=CHOICES, images=None, **more):
    fields = {"id": name, "source": name[0], "problem": problem, "solution": solution, "choices": choices}
    return fields | {"images": images or [picture(colour)]} | more


def made_set(folder, rows, **options):
    written(rows, folder, **options)
    return str(folder)


def two_sets(tmp_path) -> list[str]:
    """30 rows in two files, and 10 with several images, one of which is that of row 0 of the first set."""
    first = [question(f"a{n}", (n, 0, 0), solution="ABC"[n % 3]) for n in range(30)]
    second = [question(f"b{n}", None, images=[picture((0, n, 0)), picture((0, 0, n))]) for n in range(10)]
    return [made_set(tmp_path / "a", first), made_set(tmp_path / "b", second, columns=("images",))]


def merged(tmp_path, paths, *flags) -> int:
    return main(["data", "merge", *paths, "--output_dir", str(tmp_path / "out"), "--workers", "0", *flags])


def test_the_same_image_in_another_format_is_the_same(tmp_path):
    """The duplicate is a WEBP without loss; the contradiction differs in case and white space; both are listed."""
    image = Image.effect_noise((20, 20), 90).convert("RGB")
    png, webp = ({"bytes": encoded(image, kind, lossless=True), "path": None} for kind in ("PNG", "WEBP"))
    rows = [question("a0", None, images=[png]), question("a1", (1, 1, 1)), question("a2", (2, 2, 2))]
    first = made_set(tmp_path / "a", rows)
    rows = [question("b0", None, images=[webp]), question("b1", (1, 1, 1), problem=" which  COLOUR?", solution="B")]
    second = made_set(tmp_path / "b", [*rows, question("b2", (2, 2, 2), problem="How many?")])
    assert merged(tmp_path, [first, second], "--test_share", "0") == 0
    assert sorted(row["id"] for row in rows_in(tmp_path / "out")) == ["a0", "a2", "b2"]
    other = "another row with the same image and question has another answer"
    assert skipped_in(tmp_path / "out") == [
        {"file": first, "row": 1, "reason": other},
        {"file": second, "row": 0, "reason": "it has the same image and question as an earlier row"},
        {"file": second, "row": 1, "reason": other},
    ]


def test_two_sets_become_one_that_datasets_reads_and_a_merge_again_gives_the_same(tmp_path):
    sources = two_sets(tmp_path)
    assert merged(tmp_path, sources, "--shuffle_choices") == 0
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in loaded.items()} == {"train": 36, "test": 4}
    train, test = ({i.getpixel((0, 0)) for row in rows for i in row["images"]} for rows in loaded.values())
    assert not train & test
    by_id = {row["id"]: row for rows in loaded.values() for row in rows}
    assert by_id.keys() == {f"a{n}" for n in range(30)} | {f"b{n}" for n in range(10)}
    assert [image.getpixel((0, 0)) for image in by_id["b5"]["images"]] == [(0, 5, 0), (0, 0, 5)]
    assert by_id["a7"]["choices"]["ABC".index(by_id["a7"]["solution"])] == CHOICES[7 % 3]
    first = {name: rows_in(tmp_path / "out", name) for name in ("train", "test")}
    assert merged(tmp_path, sources, "--shuffle_choices") == 0
    assert {name: rows_in(tmp_path / "out", name) for name in ("train", "test")} == first
    assert merged(tmp_path, sources, "--test_share", "0") == 0
    assert (len(rows_in(tmp_path / "out")), rows_in(tmp_path / "out", "test")) == (40, [])  # none is in both
    assert merged(tmp_path, ["out"], "--output_dir", "out/in") == merged(tmp_path, sources, "--test_share", "1") == 1


def test_regions_are_carried_on_in_the_form_of_converted_sets(tmp_path):
    """The image is 12x8: 3 of 12 and 4 of 8 pixels are 0.25 and 0.5 of it; a set without regions has empty lists."""
    boxes = {"pixels": {"regions": [[3, 4, 6, 2]]}, "corners": {"bbox": [0.25, 0.5, 0.75, 1]}}
    for name, colour in zip(boxes, ("red", "green"), strict=True):
        Image.new("RGB", (12, 8), colour).save(tmp_path / f"{name}.png")
    rows = [{"id": name, "prompt": "?", "answer": "x", "image": f"{name}.png", **box} for name, box in boxes.items()]
    marked = question("c0", (9, 9, 9), regions=[[0.5, 0, 0.25, 1]])
    sources = [str(jsonl(tmp_path / "mine.jsonl", rows)), made_set(tmp_path / "d", [question("d0", (8, 8, 8))])]
    sources.append(made_set(tmp_path / "c", [marked], columns=("image", "regions")))
    assert merged(tmp_path, sources, "--test_share", "0") == 0
    found = {row["id"]: row["regions"] for row in rows_in(tmp_path / "out")}
    expected = {"pixels": [[0.25, 0.5, 0.5, 0.25]], "corners": [[0.25, 0.5, 0.5, 0.5]], "c0": [[0.5, 0, 0.25, 1]]}
    assert found == expected | {"d0": []}


def test_both_splits_have_the_same_columns_and_letters_stay_balanced(tmp_path):
    """One row has boxes and another two images, in one split each at most; `datasets` loads no splits that differ."""
    rows = [question(f"a{n}", (n, 1, 0)) for n in range(58)]
    rows += [{**rows[n], "id": f"again{n}"} for n in range(10)]
    rows += [
        question("b", (9, 9, 9), regions=[[0.5, 0, 0.25, 1]]),
        question("c", None, images=[picture((8, 8, n)) for n in (1, 2)]),
    ]
    merged(tmp_path, [made_set(tmp_path / "a", rows, columns=("images", "regions"))], "--shuffle_choices")
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].column_names == loaded["test"].column_names
    assert {*loaded["train"].column_names} >= {"images", "regions"}
    assert Counter(row["solution"] for row in loaded["train"]) == dict.fromkeys("ABC", 18)


def test_questions_with_several_accepted_answers(tmp_path):
    """The first of each is right in the letters' turn. Only answers without overlap contradict."""
    both, rest = ["A", "green"], ["blue"]
    rows = [{"id": n, "prompt": f"{n}?", "choices": CHOICES, "answer": both if n % 2 else "C"} for n in range(12)]
    first = jsonl(tmp_path / "a.jsonl", rows)
    again = [{**rows[1], "answer": "red"}, {**rows[3], "answer": rest}, {**rows[5], "answer": [*rest, "red"]}]
    second = jsonl(tmp_path / "b.jsonl", [{**row, "id": f"b{row['id']}"} for row in again])
    assert merged(tmp_path, [str(first), str(second)], "--test_share", "0", "--shuffle_choices") == 0
    found = {int(row["id"]): row for row in rows_in(tmp_path / "out")}
    assert found.keys() == {*range(12)} - {3}
    for number, row in found.items():
        answer = resolve_solution(row["solution"], row["choices"])
        right = {each.text for each in (answer, *answer.others)}
        assert right == ({"red", "green"} if number % 2 else {"green"})
    assert len({row["choices"].index("red") for row in found.values()}) == 3


def test_rows_are_linked_over_others():
    for seed in range(5):
        train, test = split_by_image(["ab", "c", "bd", "d", "ce"], 0.4, seed)
        assert (train, test) == ([0, 2, 3], [1, 4])
    with pytest.raises(DataError):
        split_by_image(["bd", "d"], 0.5, seed=0)
