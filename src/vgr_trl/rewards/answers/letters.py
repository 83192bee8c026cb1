"""Which option of a multiple-choice question a stated answer means (`Stated answer` in definitions.md)."""

import re
from collections.abc import Sequence

from vgr_trl.rewards.answers.text import half_width, normalise

LETTERS = "ABCDEFGHIJ"

_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{(.*)\}", re.DOTALL)
_MARKS = " \t\r\n*`$"
_LETTER = re.compile(r"(?:\(\s*([A-Za-z])\s*\)|([A-Za-z])(?![A-Za-z0-9_'’]))(.*)", re.DOTALL)
_SEPARATOR = re.compile(r"[\s*`]*(?:[.:。)]{1,2}|[-–—,、](?=[\s*`]*\S))?[\s*`]*")
_OPTION_WORD = re.compile(r"(?:option|choice|[选選][项項])\s+", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[\s*`]*[.。,;!]|[ \t*`]*\n")
_REASON = re.compile(r"(?:because|since|as|因为|因為)(?![a-z])", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;!?。，、/&\n]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|[或和及]")
_LABELLED = re.compile(r"(?:\(\s*([A-Ja-j])\s*\)|([A-Ja-j])\s?\))\s*(\S[^\n]*)")
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z0-9'’])[A-Za-j](?![A-Za-z0-9])")
_POINTED_AT = re.compile(
    r"(?:(?<![A-Za-z])(?:or|and|nor|not|also|maybe|perhaps|possibly|option|choice)|[/&|+(\[]|[或和及与跟])[\s*(\[]*$",
    re.IGNORECASE,
)
_AS_A_WORD = re.compile(
    r"['’]|\s+(?!(?:or|and|nor|is|are|was|also|as|may|might|could|can|would|seems|fits|too)(?![A-Za-z]))[A-Za-z]{2}"
)


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
    letter, after = match[1] or match[2], match[3]
    rest = after[_SEPARATOR.match(after).end() :]  # type: ignore[union-attr]
    index = LETTERS.find(letter.upper())
    own = normalise(choices[index]) if 0 <= index < len(choices) else ""
    said = normalise(unwrap(rest))
    if said in ("", own) or (own and said == f"({own})"):
        return letter.upper()
    if not in_sentence:
        return None
    behind_own = re.match(re.escape(own) + r"(?=\s*[).,;!。])", half_width(rest).casefold()) if own else None
    if not (behind_own or _CLAUSE_END.match(after) or _REASON.match(rest)):
        return None
    rest = rest[behind_own.end() :] if behind_own else rest
    others = {normalise(choice) for position, choice in enumerate(choices) if position != index}
    named = {said, *(normalise(unwrap(clause)) for clause in _CLAUSE.split(rest))}
    return None if others & named or names_another(rest, letter) else letter.upper()


def read_labelled(content: str) -> str | None:
    """Return the letter, in upper case, of an option with its text (`B) blue`, `(B) blue`); None for anything else."""
    match = _LABELLED.fullmatch(unwrap(half_width(content)))
    if match is None or names_another(match[3], letter := match[1] or match[2]):
        return None
    return letter.upper()


def names_another(text: str, letter: str) -> bool:
    """Return whether `text` names an option other than `letter` by its letter.

    An `a` or `I` before a word is a word, and small letters are variables, unless `letter` is a small one too, nothing
    or something like `or` stands before them, or they are in parentheses.
    """
    text = half_width(text)
    for match in _SINGLE_LETTER.finditer(text):
        other, before = match[0], text[max(match.start() - 20, 0) : match.start()]
        if other.upper() == letter.upper() or (other in "aI" and _AS_A_WORD.match(text, match.end())):
            continue
        if other.isupper() or letter.islower() or _POINTED_AT.search(before) or not before.strip(" (*"):
            return True
    return False
