from collections import Counter

import pytest
from datasets import load_dataset
from PIL import Image
from support.made_sets import encoded, jsonl, picture, rows_in, skipped_in, written

from vgr_trl.cli.__main__ import main
from vgr_trl.data import merge as merge_module
from vgr_trl.data.convert import Output, Rules
from vgr_trl.data.load import load_path
from vgr_trl.data.merge import Row, drop_duplicates, interleaved, merge, sharing_images, split
from vgr_trl.data.public_sets import CONVERTERS
from vgr_trl.utils import ConfigError, DataError

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
    return [made_set(tmp_path / "a", first, rows_per_file=20), made_set(tmp_path / "b", second, columns=("images",))]


def merged(tmp_path, paths, *, name="out", identity="same", **options):
    rules = [Rules(CONVERTERS["jsonl"], path, root=tmp_path) for path in paths]
    sets = [(load_path(path)[1]["train"](), rule) for path, rule in zip(paths, rules, strict=True)]
    return merge(sets, Output(tmp_path / name, {"sets": identity}), workers=0, **options)


def test_two_sets_become_one_that_datasets_reads(tmp_path):
    merged(tmp_path, two_sets(tmp_path))
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in loaded.items()} == {"train": 36, "test": 4}
    train, test = ({i.getpixel((0, 0)) for row in rows for i in row["images"]} for rows in loaded.values())
    assert not train & test
    by_id = {row["id"]: row for rows in loaded.values() for row in rows}
    assert by_id.keys() == {f"a{n}" for n in range(30)} | {f"b{n}" for n in range(10)}
    assert by_id["a7"]["images"][0].getpixel((0, 0)) == (7, 0, 0)
    assert [image.getpixel((0, 0)) for image in by_id["b5"]["images"]] == [(0, 5, 0), (0, 0, 5)]
    assert (by_id["a7"]["solution"], by_id["a7"]["choices"]) == ("B", CHOICES)


def test_the_same_image_in_another_format_is_the_same(tmp_path):
    """The duplicate is a WEBP without loss; the contradiction differs in case and white space; both are listed."""
    image = Image.effect_noise((20, 20), 90).convert("RGB")
    png, webp = ({"bytes": encoded(image, kind, lossless=True), "path": None} for kind in ("PNG", "WEBP"))
    rows = [question("a0", None, images=[png]), question("a1", (1, 1, 1)), question("a2", (2, 2, 2))]
    first = made_set(tmp_path / "a", rows)
    rows = [question("b0", None, images=[webp]), question("b1", (1, 1, 1), problem=" which  COLOUR?", solution="B")]
    second = made_set(tmp_path / "b", [*rows, question("b2", (2, 2, 2), problem="How many?")])
    merged(tmp_path, [first, second], test_share=0)
    assert [row["id"] for row in rows_in(tmp_path / "out")] == ["a0", "b2", "a2"]
    other = "another row with the same image and question has another answer"
    assert skipped_in(tmp_path / "out") == [
        {"file": first, "row": 1, "reason": other},
        {"file": second, "row": 0, "reason": "it has the same image and question as an earlier row"},
        {"file": second, "row": 1, "reason": other},
    ]


def test_a_merge_that_is_killed_is_made_again_and_a_finished_one_is_not(tmp_path, monkeypatch):
    sources = two_sets(tmp_path)
    merged(tmp_path, sources, name="plain", shuffles_choices=True)
    merged(tmp_path, sources, shuffles_choices=True)
    for test in (tmp_path / "out").glob("*test*"):
        test.unlink()  # as if the command had been killed before this side was finished
    merged(tmp_path, sources, shuffles_choices=True)
    for name in ("train", "test"):
        assert rows_in(tmp_path / "out", name) == rows_in(tmp_path / "plain", name)
    monkeypatch.setattr(merge_module, "convert_rows", lambda *_: pytest.fail("looked at the rows again"))
    merged(tmp_path, sources, shuffles_choices=True)
    with pytest.raises(ConfigError, match="holds a conversion with other sets"):
        merged(tmp_path, sources, identity="another")


def test_regions_are_carried_on_in_the_form_of_converted_sets(tmp_path):
    """The image is 12x8: 3 of 12 and 4 of 8 pixels are 0.25 and 0.5 of it; a set without regions has empty lists."""
    boxes = {
        "pixels": {"regions": [[3, 4, 6, 2]]},
        "corners": {"bbox": [0.25, 0.5, 0.75, 1]},
    }
    for name, colour in zip(boxes, ("red", "green"), strict=True):
        Image.new("RGB", (12, 8), colour).save(tmp_path / f"{name}.png")
    rows = [{"id": name, "prompt": "?", "answer": "x", "image": f"{name}.png", **box} for name, box in boxes.items()]
    sources = [
        str(jsonl(tmp_path / "mine.jsonl", rows)),
        made_set(
            tmp_path / "c", [question("c0", (9, 9, 9), regions=[[0.5, 0, 0.25, 1]])], columns=("image", "regions")
        ),
        made_set(tmp_path / "d", [question("d0", (8, 8, 8))]),
    ]
    merged(tmp_path, sources, test_share=0)
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
    merged(tmp_path, [made_set(tmp_path / "a", rows, columns=("images", "regions"))], shuffles_choices=True)
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].column_names == loaded["test"].column_names
    assert {*loaded["train"].column_names} >= {"images", "regions"}
    assert Counter(row["solution"] for row in loaded["train"]) == dict.fromkeys("ABC", 18)


def test_a_set_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    assert main(["data", "merge", str(tmp_path / "torn.parquet"), "--output_dir", str(tmp_path / "out")]) == 1
    assert "torn.parquet cannot be read" in capsys.readouterr().err


def test_what_cannot_be_merged(tmp_path):
    source = made_set(tmp_path / "a", [question("a0", (1, 1, 1))])
    with pytest.raises(ConfigError, match="test_share is 1: give a number from 0"):
        merged(tmp_path, [source], test_share=1)
    with pytest.raises(DataError, match="The 1 rows cannot be split"):
        merged(tmp_path, [source])


def row(position, images="a", problem="p", answer="x", choices=(), source=0) -> Row:
    return Row(source, position, tuple(images), problem, answer, frozenset(choices))


def places(rows):
    return [(found.source, found.position) for found in rows]


@pytest.mark.parametrize(
    ("one", "other", "contradict"),
    [
        (("x", ()), ("y", ()), True),
        (("x", "xyz"), ("y", "wxy"), True),
        (("x", "xy"), ("z", "zw"), False),  # neither offers the other's answer: both can be right
        (("x", "xy"), ("y", ()), False),  # the open answer says y where x was offered beside it: not comparable
    ],
)
def test_rows_that_contradict_each_other_are_both_left_out(one, other, contradict):
    rows = [row(number, answer=answer, choices=choices) for number, (answer, choices) in enumerate((one, other))]
    kept, reasons = drop_duplicates(rows)
    assert (len(kept), len(reasons)) == ((0, 2) if contradict else (1, 1))


def test_the_share_is_met_exactly_where_no_image_is_shared():
    rows = [row(number, [str(number)]) for number in range(200)]
    train, test = split(rows, 0.1, seed=0)
    assert (len(train), len(test)) == (180, 20)
    assert split(rows, 0.1, seed=0) == (train, test)
    assert set(split(rows[::-1], 0.1, seed=0)[1]) == set(test)
    assert set(split(rows, 0.1, seed=1)[1]) != set(test)
    assert split(rows, 0, seed=0) == (rows, [])
    assert [len(side) for side in split(rows[:2], 0.75, seed=0)] == [1, 1]  # one and a half rows round to all


def test_rows_are_linked_over_others():
    rows = [row(0, "ab"), row(1, "c"), row(2, "bd"), row(3, "d"), row(4, "ce")]
    assert [places(group) for group in sharing_images(rows)] == [[(0, 0), (0, 2), (0, 3)], [(0, 1), (0, 4)]]
    with pytest.raises(DataError, match="The 2 rows cannot be split: all are linked by images they share"):
        split(rows[2:4], 0.5, seed=0)


def test_sources_are_spread_evenly():
    rows = [row(n) for n in range(4)] + [row(n, source=1) for n in range(2)]
    # Places (n + 1/2) / count: 1/8, 3/8, 5/8, 7/8 and 1/4, 3/4.
    assert places(interleaved(rows)) == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
