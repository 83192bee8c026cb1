import json

import pytest
from PIL import Image
from support.made_sets import encoded, jsonl, questions, reasons

from vgr_trl.data.public_sets import Keys, names_videos
from vgr_trl.data.public_sets import jsonl_read as read
from vgr_trl.data.read import Source


def read_rows(tmp_path, *rows, **options):
    return list(read(Source(data_files=[str(jsonl(tmp_path / "mine.jsonl", list(rows)))]), **options))


def test_the_known_columns(tmp_path):
    row = {"prompt": "How many?", "answer": 3, "images": ["a.png", "b/c.png"]}
    (found,) = questions(read_rows(tmp_path, row))
    assert (found.id, found.source) == ("mine.jsonl-0", "mine")
    assert (found.problem, found.solution, found.choices) == ("How many?", "3", None)
    assert found.images == [str(tmp_path / "a.png"), str(tmp_path / "b/c.png")]


def test_columns_and_folder_of_the_users_own(tmp_path):
    row = {"frage": "Which?", "antwort": "two", "bild": "a.png", "wahl": ["one", "two"], "prompt": "no", "answer": "no"}
    keys = Keys(prompt=("frage",), answer=("antwort",), image=("bild",), choices=("wahl",))
    (found,) = questions(read_rows(tmp_path, row, keys=keys, image_dir=tmp_path / "images"))
    assert (found.problem, found.solution, found.choices) == ("Which?", "B", ["one", "two"])
    assert found.images == [str(tmp_path / "images" / "a.png")]


def test_absolute_paths_stay(tmp_path):
    row = {"prompt": "q", "answer": "a", "images": f"{tmp_path}/x/a.png"}
    (found,) = questions(read_rows(tmp_path, row, image_dir=tmp_path))
    assert found.images == [f"{tmp_path}/x/a.png"]


def test_a_conversation_of_one_message(tmp_path):
    row = {"prompt": [{"role": "user", "content": "What?"}], "answer": "x", "image": "a.png"}
    assert questions(read_rows(tmp_path, row))[0].problem == "What?"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": float("nan")}, "solution is nan"),
        ({"answer": float("inf")}, "solution is inf: give a finite number"),
        ({"choices": ["x", {"a": 1}]}, "one of its options is {'a': 1}: options must be texts or numbers"),
        ({"source": "\ud800"}, r"its text '\ud800' has characters that are not Unicode"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "its prompt is a conversation: a converted row has a text"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, row, reason):
    """Those that `train` and `inspect` refuse as well are in tests/data/rows/test_same_rows.py."""
    ((_, found),) = reasons(read_rows(tmp_path, {"prompt": "q", "answer": "a", "images": ["a.png"]} | row))
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "q", "answer": "a", "images": ["a.png"]', "the line is not JSON (Expecting"),
        ("[" * 100_000, "the line is not JSON ("),
    ],
)
def test_lines_that_are_no_rows(tmp_path, line, reason):
    candidates = read_rows(tmp_path, "", line, "", {"prompt": "q", "answer": "a", "image": "a.png"})
    ((row, found),) = reasons(candidates)
    assert row == 1
    assert found.startswith(reason)
    assert questions(candidates)[0].id == "mine.jsonl-3"


def test_other_encodings(tmp_path):
    path = tmp_path / "mine.jsonl"
    good = json.dumps({"prompt": "schön?", "answer": "ja", "image": "a.png"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + good.encode() + b"\n" + good.encode("latin-1") + b"\n")
    candidates = list(read(Source(data_files=[str(path)])))
    assert [question.problem for question in questions(candidates)] == ["schön?"]
    assert reasons(candidates) == [(1, "the line is not UTF-8")]


def test_a_json_list_is_read_too(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": "q", "answer": "a", "image": "a.png"}, 5]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    candidates = list(read(Source(dataset_path=str(tmp_path))))
    assert len(questions(candidates)) == 1
    assert reasons(candidates) == [(1, "the row is a int, not an object with columns")]
    assert encoded(Image.open(tmp_path / "a.png"))


def test_videos_are_paths_that_exist(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"film")
    rows = [{"prompt": "q", "answer": "a", "videos": name} for name in ("a.mp4", ["a.mp4"], "b.mp4", 5, "x" * 999)]
    found = read_rows(tmp_path, *rows)
    assert [(item.images, item.videos) for item in questions(found)] == [([], [str(tmp_path / "a.mp4")])] * 2
    assert [reason[:40] for _, reason in reasons(found)] == [
        f"video file {tmp_path}/b.mp4 does not exist"[:40],
        "its video is 5: it must be a path",
        f"video file {tmp_path}/{'x' * 999}"[:40],
    ]


def test_paths_do_not_depend_on_where_the_files_are_named_from(tmp_path, monkeypatch):
    jsonl(tmp_path / "sub" / "mine.jsonl", [{"prompt": "q", "answer": "a", "image": "a.png"}])
    monkeypatch.chdir(tmp_path)
    ((_, found),) = read(Source(data_files=["sub/mine.jsonl"]))
    assert found.images == [str(tmp_path / "sub" / "a.png")]


def test_a_column_of_videos_is_seen_in_the_first_row(tmp_path):
    for row, expected in (({"videos": None}, True), ({"video": "x"}, True), ({"film": "x"}, False), ([1], False)):
        assert names_videos(Source(data_files=[str(jsonl(tmp_path / "mine.jsonl", [row]))])) is expected
    mine = Source(data_files=[str(jsonl(tmp_path / "mine.jsonl", [{"film": "x"}]))])
    assert names_videos(mine, Keys(video=("film",)))
