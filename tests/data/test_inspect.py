import json
import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from vgr_trl.cli.data import main as data
from vgr_trl.data.checked_rows import REASON, RowOptions
from vgr_trl.data.inspect import LITERAL, inspect_rows, report
from vgr_trl.data.load import load_path
from vgr_trl.data.prompts import SIZES

HOSTILE = "</p><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} \u2028\u202e\x1b[2J"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Eight rows: the images of 2 and 6 are missing or damaged, the solution of 3 and 4 is none."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGBA", (40, 30), (255, 0, 0, 0)).save(tmp_path / "a.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    made = {"source": "made", "choices": ["x", "y"], "solution": "B", "image": "a.png"}
    rows = [{"id": f"q{number}", "problem": f"which {number}?", **made} for number in range(8)]
    rows[0]["problem"] = HOSTILE
    rows[2]["image"] = "missing.png"
    rows[3]["solution"], rows[4]["solution"] = "zebra", "giraffe"
    rows[5] |= {"choices": None, "solution": "B) forty-two"}
    rows[6]["image"] = "half.png"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def main(flags: str) -> int:
    return data(["inspect", *flags.split()])


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_are_counted_by_reason_and_the_others_by_what_they_are(folder, streaming):
    split, loads = load_path("rows.jsonl", streaming=streaming)
    found = inspect_rows(loads[split](), RowOptions(root=folder), split)
    assert [(row.row, row.id) for row in found.skipped] == [(2, "q2"), (3, "q3"), (4, "q4"), (6, "q6")]
    lines = [" ".join(line.replace("█", "").split()) for line in found.text.splitlines()]
    assert lines[0] == "train: 8 rows, 4 unusable; 2 because of an unreadable answer."
    reasons = lines[lines.index("skipped") + 1 :]
    shares = [line.split()[:2] for line in reasons[:3]]
    assert shares == [["2", "25.0%"], ["1", "12.5%"], ["1", "12.5%"]]  # zebra and giraffe are one kind of mistake
    examples = [line.split(":")[0] for line in reasons[3:7]]
    assert examples == [f"row {n}, counted from 0 (id 'q{n}')" for n in (2, 3, 4, 6)]
    answers = {one["row"]: one["answer"] for one in found.sample}
    assert answers == {0: "B. y", 1: "B. y", 5: "B) forty-two", 7: "B. y"}


def test_open_answers_that_only_the_same_text_matches_are_named():
    golds = ["10√{2}", "40海里", "cat", "5 March 2021", "x=5", "3, 4", "No, it is 5.", "7 or so", "5 to 6 cm"]
    rows = [{"source": "s", "solution": gold, "choices": None} for gold in golds]
    table = report([{REASON: None, SIZES: [], **row} for row in rows]).split(LITERAL)[1]
    assert [line.split(maxsplit=2)[2].strip("█ ") for line in table.strip().splitlines()[:2]] == [
        "7 or so",
        "5 to 6 cm",
    ]


def test_the_page_shows_text_as_text_and_holds_its_images(folder, capsys):
    assert main("rows.jsonl --tiny --max_prompt_length 700 --skipped bad.jsonl --page inspect.html --strict") == 1
    page = (folder / "inspect.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|<[^>]*\son\w+ *=", page)
    assert page.count("<img") == 4
    sources = re.findall(r"<[^>]*\s(?:src|href)=\W?([^>]*)", page)
    assert all(source.startswith(("data:image/jpeg;base64,", "#")) for source in sources)
    assert HOSTILE.replace("\u2028\u202e\x1b", r"\u2028\u202e\x1b") in unescape(page)
    for shown in ("which 1?", "forty-two", "zebra", "q6", "40 × 30", "max_prompt_length=700 skips 0 rows"):
        assert shown in unescape(page)
    assert [json.loads(line)["row"] for line in (folder / "bad.jsonl").read_text().splitlines()] == [2, 3, 4, 6]
    printed = capsys.readouterr().out
    assert "row 3, counted from 0 (id 'q3'): " in printed
    assert "prompt length in tokens" in printed


def test_images_in_two_splits_are_named_and_lengths_are_compared_with_three_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30)).save("a.png")
    Image.new("RGB", (40, 30), "red").save("b.png")
    for split, names in (("train", "aab"), ("test", "a")):
        rows = [{"problem": f"which {n}?", "solution": "x", "image": f"{name}.png"} for n, name in enumerate(names)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(". --tiny --samples 1 --max_prompt_length 20 --page p.html") == 0
    printed, page = capsys.readouterr().out, (tmp_path / "p.html").read_text(encoding="utf-8")
    for text in (printed, page):
        assert "2 rows of train have an image that is also in test." in text
        for limit in (10, 20, 40):
            assert f"max_prompt_length={limit} skips 3 rows (100.0%)" in text
        assert "images by tokens" in text
