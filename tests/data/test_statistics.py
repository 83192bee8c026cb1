import json
import re
import sys

import pytest

from vgr_trl.data.columns import Question
from vgr_trl.data.convert import (
    Encoded,
    Statistics,
    figures,
    kind_of,
    on_one_line,
    plot,
    report,
    size_class,
    tables,
)
from vgr_trl.utils import ConfigError


def counted() -> Statistics:
    found = Statistics()
    for number in range(3):
        asked = Question(str(number), "$5 set", "Which?", "AB"[number % 2], ["image"], ["x", "y"])
        found.add(asked, [Encoded(b"", ".png", 640, 480)])
    found.add(Question("3", "other", "Which?", "B", ["image"] * 2), [Encoded(b"", ".png", 8, 2000)] * 2)
    found.skip("image file /a/b.png does not exist")
    found.skip("image file /c/d.png does not exist")
    found.skip("it has no image")
    return found


REPORT = """4 rows

rows by source
          3   75.0%  $5 set
          1   25.0%  other

rows by number of choices
          3   75.0%  2
          1   25.0%  open

multiple-choice rows by right letter
          2   66.7%  A
          1   33.3%  B

commonest answers to open questions
          1  100.0%  B

rows by number of images
          3   75.0%  1
          1   25.0%  2

images by pixels of the shorter side
          2   40.0%  below 32
          3   60.0%  256 to 511

left out
          2   66.7%  image file … does not exist
          1   33.3%  it has no image
"""


def test_the_report_by_hand():
    assert report(counted()) == REPORT
    assert report(Statistics()) == "0 rows\n"


def test_the_commonest_answers_to_open_questions_come_first_and_the_rest_together():
    found = Statistics()
    for number in range(40):
        for _ in range(3 if number == 7 else 1):
            asked = Question(str(number), "set", "What?", f"answer  {number}" + "!" * 200, ["image"])
            found.add(asked, [Encoded(b"", ".png", 8, 8)])
    (first, *middle, last) = tables(found)["answers"].items()
    assert first == ("answer 7" + "!" * 72, 3)
    assert [count for _, count in middle] == [1] * 11
    assert last == ("others", 28)


def test_no_more_answers_are_counted_than_memory_has_room_for(monkeypatch):
    monkeypatch.setattr("vgr_trl.data.convert.MOST_ANSWERS", 2)
    found = Statistics()
    for text in "abcabc":
        found.add(Question(text, "set", "What?", text, ["image"]), [Encoded(b"", ".png", 8, 8)])
    assert found.answers == {"a": 2, "b": 2, "others": 2}


def test_counts_survive_being_written_down():
    assert Statistics.of(json.loads(json.dumps(vars(counted())))) == counted()


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ((31, 900), "below 32"),
        ((32, 32), "32 to 63"),
        ((900, 63), "32 to 63"),
        ((512, 512), "512 to 1023"),
        ((1024, 1024), "1024 and more"),
    ],
)
def test_classes_of_sizes(size, name):
    assert size_class(*size) == name


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (
            "image has 5000x900 pixels, more than max_image_pixels=10",
            "image has 1x2 pixels, more than max_image_pixels=3",
            "image has … pixels, more than max_image_pixels=…",
        ),
        (
            "solution is 'red', which is none of the choices",
            "solution is 'a, b', which is none of the choices",
            "solution is …, which is none of the choices",
        ),
        ("the line is not JSON (line 1)", "the line is not JSON (Expecting value)", "the line is not JSON …"),
        (
            "image file /a/my images/x y.png does not exist",
            "image file b.png does not exist",
            "image file … does not exist",
        ),
        ("video file /a/1.mp4 does not exist", "video file c/d.avi does not exist", "video file … does not exist"),
        (
            "is the number 3, which is one option's text and could be another's index",
            "is the number 10, which is one option's text and could be another's index",
            "is the number …, which is one option's text and could be another's index",
        ),
        ("the line is not UTF-8", "the line is not UTF-8", "the line is not UTF-8"),
    ],
)
def test_reasons_of_a_kind_are_counted_together(one, other, kind):
    assert kind_of(one) == kind_of(other) == kind


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n b", "a b"), ("\x1b[31mred\x07", r"\x1b[31mred\x07"), ("x\u202ey", r"x\u202ey"), ("汉字 é 🎉", "汉字 é 🎉")],
)
def test_names_of_the_data_neither_break_lines_nor_steer_a_terminal(text, shown):
    assert on_one_line(text) == shown
    statistics = Statistics()
    statistics.count(text, None, 1)
    assert f"          1  100.0%  {shown}" in report(statistics).splitlines()


def test_the_plot_shows_every_table(tmp_path):
    pytest.importorskip("matplotlib")
    plot({"train": counted(), "test": counted()}, tmp_path / "new" / "set.svg")
    picture = (tmp_path / "new" / "set.svg").read_text(encoding="utf-8")
    for title in re.findall(r"\n\n(.+)", REPORT):
        assert f"<!-- {title} -->" in picture
    assert "<!-- train -->" in picture
    assert "<!-- test -->" in picture
    plot({"train": counted()}, tmp_path / "set.png")
    assert (tmp_path / "set.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=re.escape("pip install vgr_trl[plots]")):
        figures()
