from pathlib import Path

import pytest
import yaml

from vgr_trl.cli.arguments import DataArguments, load_system_prompt
from vgr_trl.data.checked_rows import RowOptions, ready_row
from vgr_trl.data.prompts import SYSTEM_PROMPT, SYSTEM_PROMPTS, PromptTemplate, build_prompt, placed
from vgr_trl.errors import ConfigError, DataError

TABLE = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "choices", "system"), TABLE["filled"])
def test_a_template_is_filled_in_for_each_question(text, choices, system):
    template = PromptTemplate(text)
    prompt = build_prompt("{{ 7 * 7 }} <b>", choices, system_prompt=template, source="nlvr")
    found = [message["content"] for message in prompt if message["role"] == "system"]
    assert found == ([text] if system is None else [system] if system else [])


@pytest.mark.parametrize(("text", "role"), TABLE["wrong"])
def test_wrong_templates_are_refused(text, role):
    with pytest.raises(ConfigError):
        PromptTemplate(text, role=role)


@pytest.mark.parametrize("text", TABLE["failing"])
def test_a_template_that_fails_or_reaches_out_of_the_sandbox_is_a_reason(text):
    options = RowOptions(system_prompt=PromptTemplate(text, "mine.txt"))
    with pytest.raises(DataError):
        ready_row({"problem": "q", "solution": "x"}, options)


def test_the_system_prompt_that_flags_name(tmp_path):
    assert load_system_prompt(DataArguments()) == SYSTEM_PROMPT
    assert load_system_prompt(DataArguments(prompt_language="zh")) == SYSTEM_PROMPTS["zh"]
    (tmp_path / "mine.txt").write_text("{{ letters | length }} options\n", encoding="utf-8")
    mine = load_system_prompt(DataArguments(system_prompt_file=str(tmp_path / "mine.txt")))
    assert isinstance(mine, PromptTemplate)
    assert build_prompt("q", ["a", "b"], system_prompt=mine)[0]["content"] == "2 options"
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    assert load_system_prompt(DataArguments(system_prompt_file=str(tmp_path / "empty.txt"))) is None
    assert load_system_prompt(DataArguments(system_prompt_file="none")) is None
    for other in ("system_prompt_file", "question_template_file"):
        with pytest.raises(ConfigError):
            DataArguments(prompt_language="zh", **{other: "mine.txt"})


def test_a_question_template_is_what_the_user_says(tmp_path):
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Put the answer in \\boxed{}.\n")
    template = load_system_prompt(DataArguments(question_template_file=str(tmp_path / "math.jinja")))
    assert build_prompt(" 2 + 2? ", system_prompt=template) == [
        {"role": "user", "content": "2 + 2? Put the answer in \\boxed{}."}
    ]
    dialogue = {"prompt": [{"role": "user", "content": "q"}], "solution": "x"}
    with pytest.raises(DataError):
        ready_row(dialogue, RowOptions(system_prompt=template))


@pytest.mark.parametrize(("content", "parts"), TABLE["placed"], ids=str)
def test_a_placeholder_becomes_the_place_of_an_image_and_no_other_character_changes(content, parts):
    assert placed([{"role": "user", "content": content}]) == [{"role": "user", "content": parts}]
