import re

import pytest

from vgr_trl.data.prompts import placed, require_placeholders
from vgr_trl.utils import DataError

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def asked(content, *before):
    return [*before, {"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("What?", "What?"),
        ("<image>\nWhat?", [IMAGE, text("\nWhat?")]),
        ("What? <image>", [text("What? "), IMAGE]),
        ("<image><image>", [IMAGE, IMAGE]),
        ("<image> or <image>?", [IMAGE, text(" or "), IMAGE, text("?")]),
        ("<image 1> stays", "<image 1> stays"),
        ([text("see <image>")], [text("see "), IMAGE]),
        ([{"type": "image", "text": None}, text("x")], [IMAGE, text("x")]),
    ],
)
def test_a_mark_becomes_the_place_of_an_image_and_no_other_character_changes(content, parts):
    assert placed(asked(content)) == asked(parts)


def test_marks_of_other_roles_are_texts():
    system = {"role": "system", "content": "An <image> follows."}
    assert placed(asked("q", system)) == asked("q", system)
    assert placed(asked("<image>", system)) == asked([IMAGE], {**system, "content": [text("An <image> follows.")]})
    require_placeholders(asked("<image>", system), 1)


@pytest.mark.parametrize(("prompt", "images"), [("q", 0), ("q", 2), ("<image>q", 1), ("<image><image>", 2)])
def test_as_many_marks_as_images_or_none(prompt, images):
    assert require_placeholders(prompt, images) is None
    assert require_placeholders(asked(prompt), images) is None


@pytest.mark.parametrize(
    ("prompt", "images", "marks"),
    [("<image>", 0, 1), ("<image>", 2, 1), ("<image> <image>", 1, 2), ([IMAGE, text("<image>")], 1, 2)],
)
def test_other_numbers_are_refused(prompt, images, marks):
    reason = re.escape(f"its prompt has {marks} <image> marks, but there are {images} images")
    for given in (prompt, asked(prompt)) if isinstance(prompt, str) else (asked(prompt),):
        with pytest.raises(DataError, match=reason):
            require_placeholders(given, images)


def test_marks_beside_a_video_are_refused():
    with pytest.raises(DataError, match="marks places of images beside a video"):
        require_placeholders("<image>", 1, has_videos=True)
