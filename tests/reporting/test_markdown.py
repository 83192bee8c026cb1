import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console
from support.made_records import completion, record

from vgr_trl.config import ReportOptions
from vgr_trl.errors import printable
from vgr_trl.reporting.console import print_record
from vgr_trl.reporting.markdown import MarkdownLogs, Summary, load_sections

PARSER = MarkdownIt("commonmark").enable("table")
METRICS = {
    "late": {"vgr": 2.0, "aei_vision": 5 / 6, "aei_instruction": None, "mdi_balance": 0.0, "attention_vision": 0.4,
             "attention_instruction": 0.2},
}  # fmt: skip
SUMMARY = Summary(8, {"accuracy_reward": (0.25, 0.46291), "total": (0.5, math.nan)}, 0.25, METRICS)
# Pieces that mean something to Markdown, HTML, terminals and editors, beside any character at all.
PIECES = st.sampled_from(
    ["```", "`", "~~~", "# ", "\n", "\r", "\r\n", "\n\n", "- ", "> ", "| ", "---", "    ", "\t", "<script>", "<!--",
     "-->", "</details>", "[a](b)", "![", "**", "&lt;", "\\", "\x1b[31m", "\x00", "\x0b", "\x0c", "\x85", "\u2028",
     "\u202e", "=====", "$$", "1. ", "\ud800", "\x7f", "```text\n"]
)  # fmt: skip
ANY = st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)


def structure(markdown):
    return [(token.type, token.tag) for token in PARSER.parse(markdown)]


def blocks(markdown, language):
    return [token.content for token in PARSER.parse(markdown) if token.type == "fence" and token.info == language]


def test_a_section_on_rollouts_has_numbers_texts_and_rewards():
    shown = completion(
        prompt="what?", text="<think>red</think>", solution="A", rewards={"accuracy_reward": 1.0}, reward=1.25,
        advantage=0.5, correct=True, metrics=METRICS,
    )  # fmt: skip
    section = load_sections().rollouts(record(3, "train", shown, completion(correct=False, replaced=True)), SUMMARY)
    tokens = PARSER.parse(section)
    cells = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type in ("td_open", "th_open")]
    assert cells == [
        "reward", "mean", "standard deviation", "accuracy\\_reward", "0.25", "0.4629", "total", "0.5", "–",
        "segment", "VGR", "AEI image", "AEI instruction", "late", "2", "0.8333", "–",
    ]  # fmt: skip
    assert blocks(section, "text") == ["what?\n", "<think>red</think>\n", "A\n", "what?\n", "red\n"]
    rewards, attention, _ = map(json.loads, blocks(section, "json"))
    assert rewards == {"rewards": {"accuracy_reward": 1.0}, "reward": 1.25, "advantage": 0.5}
    assert attention["late"]["vgr"] == 2.0
    cut = load_sections().rollouts(record(0, "eval", completion(prompt="abcdef", text="ghijkl")), SUMMARY, 2, 3)
    assert [text.partition("\n")[0] for text in blocks(cut, "text")] == ["ab", "ghi"]


@given(ANY, ANY.filter(lambda name: bool(name.split())), st.none() | st.integers(1, 10))
def test_no_text_changes_the_structure_of_a_section(text, name, length):
    def written(text, name):
        shown = completion(prompt=text, text=text, solution=text, tokens=[text], weights=[1.0], rewards={name: 1.0})
        of_record = record(0, "train", shown)
        summary = Summary(4, {name: (0.5, 0.5)}, segments={name: {"vgr": 1.0}}, credit={name: 1.0})
        parts = load_sections().attention(of_record, summary), load_sections().token_weights(of_record, summary)
        return "\n".join([load_sections().rollouts(of_record, summary, length, length), *parts])

    assert structure(written(text, name)) == structure(written("t", "n"))


def test_a_file_that_is_full_says_so_once_and_stays(tmp_path):
    """Also for a run that continues, which begins with the file as it is."""
    path, text = tmp_path / "deep" / "rollouts.md", completion(text="x" * 400)
    options = ReportOptions(rollout_log_path=str(path), markdown_logs=False, rollout_log_max_megabytes=0.002)
    options.token_weights = True
    for _ in range(2):
        for step in range(10):
            MarkdownLogs(options, "20260101", attention=False).add(record(step, "train", text), SUMMARY)
    section = len(load_sections().rollouts(record(0, "train", text), SUMMARY).encode())
    assert 2000 <= path.stat().st_size < 2000 + section + 200
    written = path.read_text()
    assert written.count("vgr-trl report") == written.count("# Rollouts\n") == 1
    assert written.startswith("# Rollouts\n\n## Training, step 0\n")
    assert "## Training, step 9\n" not in written
    assert "## Training, step 0\n" in (path.parent / "token_weights.md").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x00\u202e\x85\r\nnext\rlast", "\\x1b[31mred\\x00\\u202e\\x85\nnext\\x0dlast"),
        ("".join(chr(0xE0000 + ord(letter)) for letter in "hi"), r"\U000e0068\U000e0069"),  # tags, that mirror ASCII
        ("a\u200bb\u2060c\ufeffd\xade", r"a\u200bb\u2060c\ufeffd\xade"),
        ("\U000e0101\U000e01ef", r"\U000e0101\U000e01ef"),  # variation selectors, a byte each
        # What emoji and scripts are joined with stays.
        *[(text, text) for text in ("é 红 👍 \t", "\U0001f469\u200d\U0001f52c", "\u2764\ufe0f", "\u06cc\u200c\u062e")],
    ],
)
def test_text_that_does_not_show_is_written_as_its_numbers(text, shown):
    assert printable(text) == shown


@given(ANY)
def test_no_text_brings_its_own_control_characters_to_the_terminal(text):
    console = Console(file=io.StringIO(), force_terminal=False, width=80, legacy_windows=False)
    print_record(record(7, "train", completion(prompt=text, tokens=[text], rewards={text: 1.0})), console)
    assert not set(console.file.getvalue()) & set("\x1b\r\x00\x07\x08\x0b\x0c\x9b\u202e")
