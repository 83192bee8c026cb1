"""Which option of a multiple-choice question a stated answer means (`Stated answer` in definitions.md)."""

import re
from collections.abc import Sequence

from vgr_trl.rewards.text import half_width, normalise

LETTERS = "ABCDEFGHIJ"

_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{(.*)\}", re.DOTALL)
_MARKS = " \t\r\n*`$"
_LETTER = re.compile(r"(?:\(\s*([A-Za-z])\s*\)|([A-Za-z])(?![A-Za-z0-9_'’]))(.*)", re.DOTALL)
_SEPARATOR = re.compile(r"[\s*`]*(?:[.:。)]{1,2}|[-–—,、](?=[\s*`]*\S))?[\s*`]*")
_OPTION_WORD = re.compile(r"(?:option|choice|[选選][项項])\s+", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[\s*`]*[.。,;!]")
_REASON = re.compile(r"(?:because|since|as|因为|因為)(?![a-z])", re.IGNORECASE)
_ANOTHER_LETTER = re.compile(
    r"(?:(?:or|and|nor|not|和|或|及|与|&|/)\s*)*(?:\(\s{0,3})?[A-Za-z]\s*(?:$|[).,:;/&。、]|(?:or|and)\b)"
)
_CLAUSE = re.compile(r"[.,;!?。，\n]")


def unwrap(text: str) -> str:
    """Return `text` without white space, emphasis, dollar signs, `\\boxed{}` and `\\text{}` around it."""
    for _ in range(4):
        text = text.strip(_MARKS)
        match = _WRAPPED.fullmatch(text)
        if match is None:
            break
        text = match[1]
    return text.strip(_MARKS)


def read_letter(content: str, choices: Sequence[str] = (), *, in_sentence: bool = False) -> str | None:
    """Return the one letter, in upper case, that `content` consists of; None if it is anything else.

    Args:
        content: a stated answer: a letter of either width and case, bare or in parentheses, with a full stop or colon,
            and followed by its option's text if at all.
        choices: texts of the options; without them no text may follow.
        in_sentence: whether the letter may be followed by the rest of a sentence or line, separated by punctuation or
            `because`, as long as that names no other option.
    """
    content = unwrap(half_width(content).replace(r"\(", "(").replace(r"\)", ")"))
    if in_sentence:
        content = _OPTION_WORD.sub("", content, count=1) if _OPTION_WORD.match(content) else content
    match = _LETTER.match(content)
    if match is None:
        return None
    letter, after = (match[1] or match[2]).upper(), match[3]
    rest = after[_SEPARATOR.match(after).end() :]  # type: ignore[union-attr]
    index = LETTERS.find(letter)
    own = normalise(choices[index]) if 0 <= index < len(choices) else None
    said = normalise(unwrap(rest))
    if said in ("", own) or (own and said == f"({own})"):
        return letter
    if not in_sentence or _ANOTHER_LETTER.match(rest):
        return None
    if own and re.match(re.escape(own) + r"\s*[).,;!。]", half_width(rest).casefold()):
        return letter
    if not (_CLAUSE_END.match(after) or _REASON.match(rest)):
        return None
    first_clause = normalise(unwrap(_CLAUSE.split(rest, maxsplit=1)[0]))
    others = {normalise(choice) for position, choice in enumerate(choices) if position != index}
    return None if {first_clause, said} & others else letter
