"""Where a completion states its answer (`Stated answer` in definitions.md)."""

import re
from dataclasses import dataclass

from vgr_trl.rewards.answers.text import half_width

_THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE | re.ASCII)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE | re.ASCII)
_STATEMENT = re.compile(
    r"(?P<boxed>\\boxed\s{0,9}\{)"
    r"|(?P<label>(?<![a-z])(?<!wrong )(?<!incorrect )(?<!false )answer[*_]{0,3}\s{0,9}:"
    r"|(?<!错误)(?<!错误的)答案[*_]{0,3}\s{0,9}:)[*_\s]*"
    r"|(?P<sentence>(?<![a-z])the\s{1,9}(?:(?:final|correct|right|best|true)\s{1,9}){0,2}answer\s{1,9}is(?![a-z])"
    r"|(?<!错误)(?<!错误的)答案\s{0,9}[是为為])\s{0,9}:?[*_\s]*"
    r"|(?<![不别勿没未非])(?<!不[能应應该該可会會宜要])(?<!排除)(?<!或)(?<!或者)"
    r"(?P<option>[选選][项項]\s{0,9}:?|[选選][择擇为為]?\s{0,9}:?(?=[\s*(]{0,9}[a-j](?![a-z])))[*_\s]*",
    re.IGNORECASE,
)
_OR = r"[\s$*.]*(?:[,;/&、]|or|and|或|和)[\s$*(]*"
_ALTERNATIVE_BEFORE = re.compile(rf"(?:\\boxed\s?\{{[^{{}}]*\}}|(?<![A-Za-z0-9])[A-J]\)?){_OR}$")
_ALTERNATIVE_BEHIND = re.compile(rf"{_OR}(?:\\boxed|[A-J](?![A-Za-z0-9]))")
_NEXT_OPTION = re.compile(r"[\s*(`>-]*(?:(?:or|and)\s+)?[*(`]*[A-Ja-j](?=[\s*`]*(?:$|[).:,;/]))")
_LETTER_IN_PARENTHESES = re.compile(r"(?<![A-Za-z0-9])\(\s{0,3}([A-Za-z])\s{0,3}\)")
_NOT_THE_LETTER = re.compile(
    r"(?:(?<![A-Za-z])not|n['’]t|never|except)\s+(?:be\s+)?(?:option\s+|choice\s+)?\(|(?:不|别|勿|排除)\w{0,3}\s?\(",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s)(?!\s+(?:or|and|maybe|perhaps|\d))|。(?!\s*(?:或|也|\d))", re.IGNORECASE)


@dataclass(frozen=True)
class Statement:
    """What a completion states as its answer: its text, and whether other words of a sentence may follow it."""

    text: str
    in_sentence: bool = False


def strip_thought(text: str) -> str:
    """Return `text` without what stands in `<think>`.

    Everything before a `</think>` that nothing opened is thought too, since chat templates often put `<think>` in the
    prompt; so is everything after a `<think>` that nothing closes.
    """
    kept: list[str] = []
    position, thinking = 0, False
    for tag in _THINK_TAG.finditer(text):
        if tag[1]:
            if not thinking:
                kept.clear()
            thinking, position = False, tag.end()
        elif not thinking:
            kept.append(text[position : tag.start()])
            thinking = True
    if not thinking:
        kept.append(text[position:])
    return "\n".join(kept)


def answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>` of `text`, None if there is none."""
    content, start = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            content, start = text[start : tag.start()], None
    return content


def last_statement(text: str, *, options: bool) -> Statement | None:
    """Return the last explicit statement of an answer in `text`, None if there is none.

    Args:
        options: whether `选项 X` counts, which only states one of several options.
    """
    plain = half_width(text)
    found = None
    for match in _STATEMENT.finditer(plain):
        if options or match.lastgroup != "option":
            found = match
    if found is None:
        return None
    behind = plain[found.end() :]
    if found.lastgroup == "boxed":
        content = _balanced(behind)
        before = plain[max(found.start() - 80, 0) : found.start()]
        several = _ALTERNATIVE_BEFORE.search(before) or _ALTERNATIVE_BEHIND.match(behind, len(content) + 1)
        return Statement("" if several else content)
    line, _, further = behind.partition("\n")
    if found.lastgroup == "sentence" and not options:
        line = _SENTENCE_END.split(line, maxsplit=1)[0]
    next_line = further.lstrip().partition("\n")[0]
    return Statement(f"{line}\n{next_line}" if options and _NEXT_OPTION.match(next_line) else line, in_sentence=True)


def _balanced(text: str) -> str:
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return ""


def letter_in_parentheses(text: str) -> str | None:
    """Return the letter in parentheses in `text`; None if there is none, more than one, or one behind a `not`."""
    text = half_width(text)
    letters = {letter.upper() for letter in _LETTER_IN_PARENTHESES.findall(text)}
    if _NOT_THE_LETTER.search(text):
        return None
    return letters.pop() if len(letters) == 1 else None
