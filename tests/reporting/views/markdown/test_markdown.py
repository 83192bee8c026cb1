"""Sections of the Markdown logs: their numbers, and their structure whatever the model says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.made_records import completion, record
from test_markdown_text import ANY

from vgr_trl.reporting.markdown import (
    Lengths,
    MarkdownLogs,
    Summary,
    attention_section,
    rollout_section,
    token_weights_section,
)

PARSER = MarkdownIt("commonmark").enable("table")
METRICS = {
    "late": {"vgr": 2.0, "aei_vision": 5 / 6, "aei_instruction": None, "mdi_balance": 0.0, "attention_vision": 0.4,
             "attention_instruction": 0.2},
}  # fmt: skip
SUMMARY = Summary(8, {"accuracy_reward": (0.25, 0.46291), "total": (0.5, None)}, 0.25, METRICS)


def structure(markdown):
    return [(token.type, token.tag) for token in PARSER.parse(markdown)]


def cells(markdown):
    tokens = PARSER.parse(markdown)
    return [tokens[i + 1].content for i, token in enumerate(tokens) if token.type in ("td_open", "th_open")]


def blocks(markdown, language):
    return [token.content for token in PARSER.parse(markdown) if token.type == "fence" and token.info == language]


def test_a_section_on_rollouts_says_what_was_earned_and_shown():
    shown = completion(
        prompt="what?", text="<think>red</think>", solution="A", rewards={"accuracy_reward": 1.0}, reward=1.25,
        advantage=0.5, correct=True, metrics=METRICS,
    )  # fmt: skip
    section = rollout_section(record(3, "train", shown, completion(correct=False, replaced=True)), SUMMARY, Lengths())
    assert section.startswith("## Training, step 3\n")
    assert "8 completions, success rate 0.25, 2 shown." in section
    assert cells(section) == [
        "reward", "mean", "standard deviation", "accuracy\\_reward", "0.25", "0.4629", "total", "0.5", "–",
        "segment", "VGR", "AEI image", "AEI instruction", "late", "2", "0.8333", "–",
    ]  # fmt: skip
    assert "### Sample 1: prompt 0, right" in section
    assert "### Sample 2: prompt 0, wrong" in section
    assert blocks(section, "text") == ["what?\n", "<think>red</think>\n", "A\n", "what?\n", "red\n"]
    earned, attention, _ = map(json.loads, blocks(section, "json"))
    assert earned == {"rewards": {"accuracy_reward": 1.0}, "reward": 1.25, "advantage": 0.5}
    assert attention["late"]["vgr"] == 2.0
    assert section.count("it was not trained on") == 1


def test_previews_are_of_the_lengths_asked_for():
    section = rollout_section(record(0, "eval", completion(prompt="abcdef", text="ghijkl")), SUMMARY, Lengths(2, 3))
    assert section.startswith("## Evaluation, step 0\n")
    assert blocks(section, "text") == ["ab\n[… 4 more characters]\n", "ghi\n[… 3 more characters]\n"]


def test_a_section_on_attention_has_all_quantities_of_batch_and_completions():
    section = attention_section(record(0, "train", completion(metrics=METRICS), completion()), SUMMARY)
    row = ["late", "2", "0.8333", "–", "0", "0.4", "0.2"]
    assert [cell for cell in cells(section) if cell in row] == row + row
    assert section.count("No attention was measured.") == 1


def test_a_section_on_token_weights_has_statistics_then_pairs():
    # Of the weights 0.5, 2 and 0.5, one of three is above 1.
    weighed = [completion(weights=[0.5, 2.0]), completion(tokens=["x"], weights=[0.5]), completion()]
    summary = Summary(8, {}, credit={"token_weight_mean": 1.0, "token_weight_variance": 0.25})
    section = token_weights_section(record(0, "train", *weighed), summary)
    assert cells(section) == [
        "quantity", "value", "token\\_weight\\_mean", "1", "token\\_weight\\_variance", "0.25",
        "shown tokens with weight above 1", "0.3333", "shown tokens with weight below 1", "0.6667",
    ]  # fmt: skip
    assert [json.loads(block) for block in blocks(section, "json")] == [[["red", 0.5], [".", 2.0]], [["x", 0.5]]]


@given(prompt=ANY, text=ANY, solution=ANY, token=ANY, name=ANY.filter(lambda name: bool(name.split())))
def test_no_text_changes_the_structure_of_a_section(prompt, text, solution, token, name):
    def section(prompt, text, solution, token, name):
        shown = record(
            0,
            "train",
            completion(prompt=prompt, text=text, solution=solution, tokens=[token], weights=[1.0], rewards={name: 1.0}),
        )
        summary = Summary(4, {name: (0.5, 0.5)}, segments={name: {"vgr": 1.0}}, credit={name: 1.0})
        return "\n".join(
            [
                rollout_section(shown, summary, Lengths()),
                attention_section(shown, summary),
                token_weights_section(shown, summary),
            ]
        )

    assert structure(section(prompt, text, solution, token, name)) == structure(section("p", "t", "s", "x", "n"))


@given(st.integers(1, 10), ANY)
def test_a_cut_preview_does_not_change_the_structure(length, text):
    lengths = Lengths(length, length)
    plain = rollout_section(record(0), SUMMARY, lengths)
    cut = rollout_section(record(0, "train", completion(prompt=text, text=text)), SUMMARY, lengths)
    assert structure(cut) == structure(plain)


def test_files_get_a_title_once_and_what_belongs_to_them(tmp_path):
    paths = {name: str(tmp_path / "deep" / f"{name}.md") for name in ("rollouts", "evaluations", "attention")}
    logs = MarkdownLogs(**paths, token_weights=str(tmp_path / "token_weights.md"))
    weighed = completion(weights=[1.0, 1.0])
    for step, mode in ((0, "train"), (1, "train"), (1, "eval")):
        logs.add(record(step, mode, weighed), SUMMARY)
    found = {name: (tmp_path / "deep" / f"{name}.md").read_text(encoding="utf-8") for name in paths}
    found["token_weights"] = (tmp_path / "token_weights.md").read_text(encoding="utf-8")
    headings = {
        name: [line for line in text.splitlines() if line.startswith(("# ", "## "))] for name, text in found.items()
    }
    assert headings == {
        "rollouts": ["# Rollouts", "## Training, step 0", "## Training, step 1"],
        "evaluations": ["# Evaluations", "## Evaluation, step 1"],
        "attention": ["# Attention", "## Training, step 0", "## Training, step 1", "## Evaluation, step 1"],
        "token_weights": ["# Token weights", "## Training, step 0", "## Training, step 1"],
    }


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logs = MarkdownLogs()
    logs.add(record(0), SUMMARY)
    assert not logs.wanted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rollouts", "evaluations", "attention", "token_weights"])
def test_one_file_is_enough_to_be_wanted(name):
    assert MarkdownLogs(**{name: "a.md"}).wanted


def test_a_file_that_is_full_says_so_once_and_stays(tmp_path):
    """Also for a run that goes on, which begins with the file as it is."""
    path, text = tmp_path / "rollouts.md", completion(text="x" * 400)
    for _ in range(2):
        logs = MarkdownLogs(rollouts=str(path), max_bytes=2000)
        for step in range(10):
            logs.add(record(step, "train", text), SUMMARY)
    written = path.read_text()
    section = len(rollout_section(record(0, "train", text), SUMMARY, Lengths()).encode())
    assert 2000 <= path.stat().st_size < 2000 + section + 200
    assert written.count("vgr-trl report") == 1
    assert written.rstrip().endswith("shows the completions that came later.")
    assert "## Training, step 0\n" in written
    assert "## Training, step 9\n" not in written
