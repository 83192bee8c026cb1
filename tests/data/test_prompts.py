import re

import pytest

from vgr_trl.cli.arguments import DataArguments, system_prompt_of
from vgr_trl.data.prompts import (
    SYSTEM_PROMPT,
    SYSTEM_PROMPTS,
    QuestionTemplate,
    SystemTemplate,
    build_prompt,
    placed,
    require_placeholders,
)
from vgr_trl.data.rows import RowOptions, row_problem
from vgr_trl.utils import ConfigError, DataError


def test_a_question_is_a_conversation_with_its_options_behind_letters():
    assert build_prompt("哪种颜色？", ["红", "蓝"], system_prompt=SYSTEM_PROMPTS["zh"]) == [
        {"role": "system", "content": SYSTEM_PROMPTS["zh"]},
        {"role": "user", "content": "哪种颜色？\nA. 红\nB. 蓝"},
    ]


def test_a_template_is_filled_in_for_each_question():
    template = SystemTemplate(
        "{% if choices %}Answer with one of {{ letters | join(', ') }}.{% else %}Answer in words.{% endif %}\n"
    )
    assert build_prompt("q", ["x", "y", "z"], system_prompt=template)[0]["content"] == "Answer with one of A, B, C."
    assert build_prompt("q", system_prompt=template)[0]["content"] == "Answer in words."
    about = SystemTemplate("{{ source }}: {{ problem }}")
    assert build_prompt("how many?", system_prompt=about, source="nlvr")[0]["content"] == "nlvr: how many?"


def test_a_template_that_comes_out_empty_gives_no_system_message():
    prompt = build_prompt("q", system_prompt=SystemTemplate("{% if choices %}one letter{% endif %}"))
    assert prompt == [{"role": "user", "content": "q"}]


def test_a_text_without_placeholders_stays_as_it_is():
    text = "Think in <think></think>; 100 % & {braces} stay.\nTwo lines."
    assert SystemTemplate(text).render("q") == text


def test_what_a_question_holds_is_never_run():
    assert SystemTemplate("{{ problem }}").render("{{ 7 * 7 }} <b>") == "{{ 7 * 7 }} <b>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% if choices %}", "is not a Jinja2 template"),
        ("{{ question }}", "names question, but a template knows problem, choices, letters, source only"),
        ("{% include 'other' %}{{ nothing }}", "names nothing"),
        ("{{ problem | nosuchfilter }}", "is not a Jinja2 template (No filter named 'nosuchfilter'"),
    ],
)
def test_a_wrong_template_is_a_sentence(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SystemTemplate(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ problem.__class__.__mro__ }}",
        "{{ choices.append('x') }}",
        "{{ 1 / choices | length }}",
        "{{ range(999999999) | list }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_of_the_sandbox_is_a_reason(text):
    template = SystemTemplate(text, "mine.txt")
    with pytest.raises(DataError, match=r"^mine.txt cannot be filled in for it \(.+\)$"):
        template.render("q")
    reason = row_problem({"problem": "q", "solution": "x"}, RowOptions(system_prompt=template))
    assert reason is not None
    assert reason.startswith("mine.txt cannot be filled in")


def test_the_system_prompt_that_flags_name(tmp_path):
    assert system_prompt_of(DataArguments()) == SYSTEM_PROMPT
    assert system_prompt_of(DataArguments(prompt_language="zh")) == SYSTEM_PROMPTS["zh"]
    (tmp_path / "mine.txt").write_text("{{ letters | length }} options\n", encoding="utf-8")
    mine = system_prompt_of(DataArguments(system_prompt_file=str(tmp_path / "mine.txt")))
    assert isinstance(mine, SystemTemplate)
    assert mine.render("q", ["a", "b"]) == "2 options"
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    assert system_prompt_of(DataArguments(system_prompt_file=str(tmp_path / "empty.txt"))) is None


def test_flags_that_cannot_be_followed(tmp_path):
    with pytest.raises(ConfigError, match="prompt_language is 'fr'"):
        DataArguments(prompt_language="fr")
    with pytest.raises(ConfigError, match="give only one"):
        DataArguments(prompt_language="zh", system_prompt_file="mine.txt")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    for path in (tmp_path / "no.txt", tmp_path / "latin.txt", tmp_path):
        with pytest.raises(ConfigError, match="which cannot be read as UTF-8 text"):
            system_prompt_of(DataArguments(system_prompt_file=str(path)))


def test_a_question_template_is_what_the_user_says(tmp_path):
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Put the answer in \\boxed{}.\n")
    template = system_prompt_of(DataArguments(question_template_file=str(tmp_path / "math.jinja")))
    assert build_prompt(" 2 + 2? ", system_prompt=template) == [
        {"role": "user", "content": "2 + 2? Put the answer in \\boxed{}."}
    ]
    assert row_problem({"prompt": "q", "solution": "x"}, RowOptions(system_prompt=template)) is None
    dialogue = {"prompt": [{"role": "user", "content": "q"}], "solution": "x"}
    assert "cannot be filled in with" in row_problem(dialogue, RowOptions(system_prompt=template))
    with pytest.raises(ConfigError, match="names answer, but a template knows content, problem only"):
        QuestionTemplate("{{ answer }}")
    with pytest.raises(ConfigError, match="give only one"):
        DataArguments(question_template_file="x", prompt_language="zh")
    assert system_prompt_of(DataArguments(system_prompt_file="none")) is None


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
def test_a_placeholder_becomes_the_place_of_an_image_and_no_other_character_changes(content, parts):
    assert placed(asked(content)) == asked(parts)


def test_placeholders_of_other_roles_are_texts():
    system = {"role": "system", "content": "An <image> follows."}
    assert placed(asked("q", system)) == asked("q", system)
    assert placed(asked("<image>", system)) == asked([IMAGE], {**system, "content": [text("An <image> follows.")]})
    require_placeholders(asked("<image>", system), 1)


@pytest.mark.parametrize(("prompt", "images"), [("q", 0), ("q", 2), ("<image>q", 1), ("<image><image>", 2)])
def test_as_many_placeholders_as_images_or_none(prompt, images):
    assert require_placeholders(prompt, images) is None
    assert require_placeholders(asked(prompt), images) is None


@pytest.mark.parametrize(
    ("prompt", "images", "marks"),
    [("<image>", 0, 1), ("<image>", 2, 1), ("<image> <image>", 1, 2), ([IMAGE, text("<image>")], 1, 2)],
)
def test_other_numbers_are_refused(prompt, images, marks):
    reason = re.escape(f"its prompt has {marks} <image> placeholders, but there are {images} images")
    for given in (prompt, asked(prompt)) if isinstance(prompt, str) else (asked(prompt),):
        with pytest.raises(DataError, match=reason):
            require_placeholders(given, images)


def test_placeholders_beside_a_video_are_refused():
    with pytest.raises(DataError, match="beside a video"):
        require_placeholders("<image>", 1, has_videos=True)
