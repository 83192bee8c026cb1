"""Stated answers: where a completion states one, what it says, and whether that is what the row calls right.

In this order: text, the statement, letters of options, the right answer of a row (`Stated answer` in definitions.md);
then open answers: units, numbers, and formulas, which math-verify compares.
"""

import logging
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from numbers import Real
from pathlib import Path
from typing import Any

from vgr_trl.utils import RewardError, at_most

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
_ZERO_WIDTH = dict.fromkeys((0x200B, 0x2060, 0xFEFF))  # spaces and joiners of words that no reader sees
_FINAL_MARKS = ".,;:。"
_EXCLAMATION_AFTER_WORD = re.compile(r"(?<=[^\W\d_]{2})[!?]+$")


def completion_text(completion: Any) -> str:
    """Return what the assistant wrote in one completion, its messages joined by line breaks.

    Args:
        completion: as TRL passes it, a string or a list of messages; the content of a message is a string, None or a
            list of parts, of which the text counts. Messages of other roles (tools) do not count.

    Raises:
        RewardError: the completion is neither.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise RewardError(
            f"A completion is a {type(completion).__name__}: pass a string, or a list of messages such as "
            '[{"role": "assistant", "content": "..."}].'
        )
    written = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return "\n".join(_content_text(message.get("content")) for message in written)


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content or ())


def excerpt(value: Any) -> str:
    """Return at most 80 characters of a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, of the same length."""
    return text.translate(_FULL_WIDTH)


def _fold(text: str) -> str:
    """Return `text` without differences of case, width, white space, zero-width spaces and composed accents."""
    return " ".join(half_width(unicodedata.normalize("NFC", text.translate(_ZERO_WIDTH))).casefold().split())


def normalise(text: str) -> str:
    """Return `text` without the differences that `_fold` leaves out, and without final punctuation.

    An exclamation or question mark goes only after a word, so that 5! stays 5!; a text of punctuation alone stays.
    """
    collapsed = _fold(text)
    stripped = collapsed.rstrip(_FINAL_MARKS).rstrip()
    while match := _EXCLAMATION_AFTER_WORD.search(stripped):
        stripped = stripped[: match.start()].rstrip(_FINAL_MARKS).rstrip()
    return stripped or collapsed


_THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE | re.ASCII)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE | re.ASCII)
_STATEMENT = re.compile(
    r"(?P<boxed>\\boxed\s{0,9}\{)"
    r"|(?P<label>(?<![a-z])(?<!wrong )(?<!incorrect )(?<!false )answer[*_]{0,3}\s{0,9}:"
    r"|(?<!错误)(?<!错误的)答案[*_]{0,3}\s{0,9}:)[*_\s]*"
    r"|(?P<sentence>(?<![a-z])the\s{1,9}(?:(?:final|correct|right|best|true)\s{1,9}){0,2}answer\s{1,9}is(?![a-z])"
    r"|(?<!错误)(?<!错误的)答案\s{0,9}[是为為])\s{0,9}:?[*_\s]*"
    r"|(?<![不别勿没未非])(?<!不[能应應该該可会會宜要])(?<!排除)(?<!或)(?<!或者)(?<!不是)"
    r"(?P<option>[选選][项項]\s{0,9}[是为為]?\s{0,9}:?|[选選][择擇为為]?\s{0,9}:?(?=[\s*(]{0,9}[a-j](?![a-z])))[*_\s]*",
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


def last_statement(text: str, *, options: bool) -> tuple[str, bool] | None:
    """Return what `text` last states as its answer, and whether other words of a sentence may follow; or None.

    Args:
        options: whether `选项 X` counts, which only states one of several options.
    """
    plain = half_width(text)
    found = [match for match in _STATEMENT.finditer(plain) if options or match.lastgroup != "option"]
    if not found:
        return None
    last = found[-1]
    behind = plain[last.end() :]
    if last.lastgroup == "boxed":
        content = _balanced(behind)
        before = plain[max(last.start() - 80, 0) : last.start()]
        several = _ALTERNATIVE_BEFORE.search(before) or _ALTERNATIVE_BEHIND.match(behind, len(content) + 1)
        return ("" if several else content), False
    line, _, further = behind.partition("\n")
    if last.lastgroup == "sentence" and not options:
        line = _SENTENCE_END.split(line, maxsplit=1)[0]
    next_line = further.lstrip().partition("\n")[0]
    return (f"{line}\n{next_line}" if options and _NEXT_OPTION.match(next_line) else line), True


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


LETTERS = "ABCDEFGHIJ"

_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{(.*)\}", re.DOTALL)
_MARKS = " \t\r\n*`$"
_LETTER = re.compile(r"(?:\(\s*([A-Za-z])\s*\)|([A-Za-z])(?![A-Za-z0-9_'’]))(.*)", re.DOTALL)
_SEPARATOR = re.compile(r"[\s*`]*(?:[.:。)]{1,2}|[-–—,、](?=[\s*`]*\S))?[\s*`]*")
_OPTION_WORD = re.compile(r"^(?:option|choice|[选選][项項])\s+", re.IGNORECASE)
_BARE = re.compile(r"(?i:(?:option|choice)\s{0,9}(?:is\s)?\s{0,9}:?[*_\s]{0,9})?(?=\(?[A-J](?![a-z]))")
_CLAUSE_END = re.compile(r"[\s*`]*[.。,;!]|[ \t*`]*\n")
_REASON = re.compile(r"(?:because|since|as|因为|因為)(?![a-z])", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;!?。，、/&\n]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|[或和及]")
_LABELLED = re.compile(r"(?:\(\s*([A-Ja-j])\s*\)|([A-Ja-j])\s?\))\s*(\S[^\n]*)")
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z0-9'’])[A-Za-j](?![A-Za-z0-9])")
_AS_A_WORD = re.compile(r"['’]|\s+(?!(?:or|and|nor|is|are|was|also|as|may|could)(?![A-Za-z]))[A-Za-z]{2}")


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
    match = _LETTER.match(_OPTION_WORD.sub("", content) if in_sentence else content)
    if match is None:
        return None
    letter, after = match[1] or match[2], match[3]
    rest = after[_SEPARATOR.match(after).end() :]  # type: ignore[union-attr]
    index = LETTERS.find(letter.upper())
    own = normalise(choices[index]) if 0 <= index < len(choices) else ""
    following = normalise(unwrap(rest))
    if following in ("", own) or (own and following == f"({own})"):
        return letter.upper()
    if not in_sentence:
        return None
    behind_own = re.match(re.escape(own) + r"(?=\s*[).,;!。])", half_width(rest).casefold()) if own else None
    if not (behind_own or _CLAUSE_END.match(after) or _REASON.match(rest)):
        return None
    rest = rest[behind_own.end() :] if behind_own else rest
    others = {normalise(choice) for position, choice in enumerate(choices) if position != index}
    named = {following, *(normalise(unwrap(clause)) for clause in _CLAUSE.split(rest))}
    return None if others & named or names_another(rest, letter) else letter.upper()


def read_labelled(content: str) -> str | None:
    """Return the letter, in upper case, of an option with its text (`B) blue`, `(B) blue`); None for anything else."""
    match = _LABELLED.fullmatch(unwrap(half_width(content)))
    if match is None or names_another(match[3], letter := match[1] or match[2]):
        return None
    return letter.upper()


def names_another(text: str, letter: str) -> bool:
    """Return whether `text` names an option other than `letter` by its letter.

    An `a` or `I` before a word is a word, and small letters are variables unless `letter` is a small one too.
    """
    text = half_width(text)
    for match in _SINGLE_LETTER.finditer(text):
        is_word = match[0] in "aI" and _AS_A_WORD.match(text, match.end())
        if match[0].upper() != letter.upper() and not is_word and (match[0].isupper() or letter.islower()):
            return True
    return False


_LARGEST_NUMBER = 1e18  # floats far below it are exact integers


@dataclass(frozen=True)
class Solution:
    """The right answer of a row.

    `text` is the right option's text, or the open answer; `choices` are the options if they are known, and `index` is
    the 0-based position of the right one, or of the letter that the answer is (None for any other open answer).
    """

    text: str
    choices: tuple[str, ...] = ()
    index: int | None = None


def resolve_solution(solution: Any, choices: Any = None, label_idx: Any = None) -> Solution:
    """Return which answer a row calls right (`Stated answer` in definitions.md).

    Args:
        solution: letter A–J, option text or 0-based index; without `choices` a letter, also as `(B)` or `B) blue`, or
            the open answer, text or number. An `<answer>` tag around it is taken off. A string of digits is never an
            index.
        choices: texts of the 2 to 10 options in the order of their letters; None for an open question.
        label_idx: read where `solution` is None: as it, but a number is always a 0-based index.

    Raises:
        RewardError: the solution is missing, is none of the choices, or could mean two of them; or the choices are not
            2 to 10 texts that differ.
    """
    options = _options(choices)
    if solution is None and not options and _is_number(label_idx):
        if label_idx not in range(len(LETTERS)):
            raise RewardError(f"label_idx is {excerpt(label_idx)}: without choices give an index 0 to 9")
        return Solution(LETTERS[int(label_idx)], index=int(label_idx))
    solution = label_idx if solution is None else solution
    if isinstance(solution, str):
        content = answer_tag(solution)
        solution = (solution if content is None else content).strip()
    if not (bool(solution) if isinstance(solution, str) else _is_number(solution)):
        raise RewardError(f"solution is {excerpt(solution)}: give the right answer as {_accepted(options)}")
    if options:
        index = int(solution) if _is_index(solution) else _index_of_text(_text(solution), options)
        if not 0 <= index < len(options):
            raise RewardError(f"solution is {index} of {len(options)} choices: give {_accepted(options)}")
        return Solution(options[index], options, index)
    letter = (read_letter(solution) or read_labelled(solution)) if isinstance(solution, str) else None
    if letter is not None and letter in LETTERS:
        return Solution(letter, index=LETTERS.index(letter))
    return Solution(_text(solution))


def _is_number(value: Any) -> bool:
    """Whether it is a number that floats are exact for; a bool is none."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(abs(value) < _LARGEST_NUMBER)


def _is_index(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(int(value) if _is_index(value) else value)


def _options(choices: Any) -> tuple[str, ...]:
    if choices is None:
        return ()
    choices = choices.tolist() if hasattr(choices, "tolist") else choices
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 2 <= len(choices) <= len(LETTERS):
        raise RewardError(f"choices is {excerpt(choices)}: give a list of 2 to 10 texts, or None for an open question")
    texts = [_text(choice) if isinstance(choice, str) or _is_number(choice) else "" for choice in choices]
    folded = list(map(_fold, texts))
    for letter, text, choice in zip(LETTERS, folded, choices, strict=False):
        if not text:
            raise RewardError(f"option {letter} of choices is {choice!r}: give every option a text")
        if (first := LETTERS[folded.index(text)]) != letter:
            raise RewardError(
                f"options {first} and {letter} of choices are both {excerpt(choice)} (apart from case, width, white "
                "space and how accents are encoded): give options that differ"
            )
    return tuple(texts)


def _index_of_text(solution: str, options: tuple[str, ...]) -> int:
    """The option that a solution names: by its letter, else by exactly its text, else by its text normalised."""
    letter = read_letter(solution, options)
    by_letter = [index for index in range(len(options)) if LETTERS[index] == letter]
    exact = [i for i, option in enumerate(options) if half_width(option).strip() == half_width(solution).strip()]
    alike = [i for i, option in enumerate(options) if normalise(option) == normalise(solution)]
    meant = sorted({*by_letter, *exact}) or alike
    if len(meant) > 1:
        names = " or ".join(f"{LETTERS[index]} ({excerpt(options[index])})" for index in meant)
        raise RewardError(
            f"solution is {excerpt(solution)}, which could mean option {names}: give the index of the right option"
        )
    if not meant:
        raise RewardError(f"solution is {excerpt(solution)}, which is none of the choices: give {_accepted(options)}")
    return meant[0]


def _accepted(options: tuple[str, ...]) -> str:
    if not options:
        return "a text or a number, or add choices"
    last = len(options) - 1
    return f"a letter A to {LETTERS[last]}, an integer index 0 to {last}, or the text of one option"


# One unit a line, its spellings separated by commas, and its name first; what counts in any case is decided below.
_LINES = Path(__file__).with_name("units.txt").read_text(encoding="utf-8").splitlines()
_UNITS = [line.split(", ") for line in _LINES if not line.startswith("#")]
_LISTED = {spelling: unit[0] for unit in _UNITS for spelling in unit}
_FOLDED = {
    spelling.casefold(): name
    for spelling, name in _LISTED.items()
    if len(spelling) > 1 and not (spelling[0] in "mM" and spelling[1:] in _LISTED)  # milli or mega
}

_POWERS = {"square": "2", "sq": "2", "sq.": "2", "平方": "2", "cubic": "3", "立方": "3"}
_POWER_BEFORE = re.compile(r"(square|sq\.?|cubic)\s+|(平方|立方)", re.IGNORECASE)
_POWER_BEHIND = re.compile(r"(?<=\S)\s?(?:\^\s?\{?([23])\}?|(?<=m)([23]))$")
_PER = re.compile(r"\s?/\s?|\s+per\s+", re.IGNORECASE)
_DEGREE = re.compile(r"\^?\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|[º˚]")
_LATEX_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mathbf|textbf|operatorname|rm)\s?\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\(?:quad|qquad)(?![A-Za-z])|(?<=\S)~")


def plain_units(text: str) -> str:
    r"""Return `text` with degrees, spaces and texts of LaTeX as plain characters, such as 5 cm for `5\,\text{cm}`."""
    return _LATEX_TEXT.sub(r"\1", _LATEX_SPACE.sub(" ", _DEGREE.sub("°", text))).replace("²", "^2").replace("³", "^3")


def read_unit(text: str, *, attached: bool = False) -> str | None:
    """Return the one name of the unit that `text` spells, alike for all its spellings; None if it is no unit listed.

    Args:
        text: a unit, also squared or cubed, also per another: `cm`, `square metres`, `km/h`, `m/s^2`.
        attached: whether no space is between the number and it; a letter alone is a variable there, as in 5m.
    """
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    text = text[:-1] if text.endswith(".") else text
    if attached and re.fullmatch(r"[A-Za-z](?:\^\{?\d\}?)?", text) and not re.match(r"m\^", text):
        return None
    parts = [_term(part) for part in _PER.split(text, maxsplit=1)]
    return None if None in parts else "/".join(filter(None, parts))


def _term(text: str) -> str | None:
    before, behind = _POWER_BEFORE.match(text), _POWER_BEHIND.search(text)
    if before and behind:
        return None
    base = text[before.end() :] if before else text[: behind.start()] if behind else text
    unit = _LISTED.get(base) or (_FOLDED.get(base.casefold()) if len(base) > 1 else None)
    if unit is None or not (before or behind):
        return unit
    power = _POWERS[before[0].strip().lower()] if before else behind[1] or behind[2]  # type: ignore[index]
    return f"{unit}^{power}"


_NUMBER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = r"[eE](?P<exponent>[+-]?\d{1,2})|\s?(?:×|\\times|\*)\s?10\s?\^\s?(?P<power>-?\d|\{\s?[+-]?\d{1,2}\s?\})"
_QUANTITY = re.compile(
    r"(?:(?P<before>[+-])?(?P<currency>[€£¥￥₹]|(?:US)?\\?\$)\s?)?"
    rf"(?P<sign>[+-])?(?P<number>{_NUMBER})(?:{_POWER_OF_TEN})?(?P<gap>\s*)(?P<unit>\S.*)?",
    re.DOTALL,
)
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{(\d+)\}\s?\{(\d+)\})")
_PERCENT = frozenset(["%", r"\%", "percent", "per cent", "pct"])
_MINUS = re.compile("[−–‐‑﹣]")
_LONGEST_QUANTITY = 100
_FEWEST_DECIMALS, _SMALLEST_DIGITS = 6, 10**4


@dataclass(frozen=True)
class Quantity:
    """A number, the unit it is given in ("" for none), and to how many decimals it is written (None for a fraction)."""

    value: Fraction
    unit: str = ""
    decimals: int | None = 0

    def equals(self, other: "Quantity") -> bool:
        """Return whether both are the same number; a unit that only one of them has is ignored.

        A fraction also equals its value rounded or cut to six or more decimals, five of their digits at least.
        """
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if (self.decimals is None) == (other.decimals is None):
            return self.value == other.value
        written, exact = (self, other) if other.decimals is None else (other, self)
        places = written.decimals or 0
        digits, scaled = (each.value * Fraction(10) ** places for each in (written, exact))
        if places < _FEWEST_DECIMALS or abs(digits) < _SMALLEST_DIGITS:
            return digits == scaled
        return digits in (scaled, int(scaled), round(scaled))


def read_quantity(text: str) -> Quantity | None:
    """Return the number that `text` consists of, with its unit if any; None if it is anything else.

    Args:
        text: decimal, number with thousands commas, scientific notation, fraction or percentage (5% is 0.05), with a
            currency sign or a unit of `units.txt`.
    """
    text = _MINUS.sub("-", plain_units(text)).strip().rstrip(" .,;:。")
    if len(text) > _LONGEST_QUANTITY or not text.isprintable():
        return None
    if match := _FRACTION.fullmatch(text):
        above, below = int(match[1] + (match[2] or match[4])), int(match[3] or match[5])
        return Quantity(Fraction(above, below), decimals=None) if below else None
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["before"] and match["sign"]):
        return None
    exponent = int((match["exponent"] or match["power"] or "0").strip("{} "))
    number = match["number"].replace(",", "")
    decimals = len(number.partition(".")[2]) - exponent
    value = Fraction(number) * Fraction(10) ** exponent
    if "-" in (match["before"], match["sign"]):
        value = -value
    unit, currency = match["unit"] or "", match["currency"]
    if unit.casefold() in _PERCENT and not currency:
        return Quantity(value / 100, "%", decimals + 2)
    names = {read_unit(unit, attached=not match["gap"])} if unit else set()
    if currency:
        names.add(read_unit(currency.replace("\\", "")))
    return None if None in names or len(names) > 1 else Quantity(value, "".join(map(str, names)), decimals)


_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "≤": r"\leq ", "≥": r"\geq ",
    "≠": r"\neq ", "±": r"\pm ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "°": r"^\circ ",
    "²": "^{2}", "³": "^{3}", "**": "^", r"\left": "", r"\right": "", r"\dfrac": r"\frac", r"\tfrac": r"\frac",
}  # fmt: skip
_COMMANDS = (
    "frac|sqrt|pi|cdot|times|div|pm|infty|theta|alpha|beta|gamma|delta|lambda|mu|phi|omega|sin|cos|tan|cot|log|ln|exp|"
    "circ|leq|geq|neq|le|ge|ne|lt|gt|cup|cap"
)
_MATHEMATICAL = re.compile(
    rf"(?:\\(?:{_COMMANDS})(?![A-Za-z])|\\[{{}}]|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|[0-9.+\-*/^=<>(){{}}\[\],|_ ])+"
)
_SIGN_OF_MATHEMATICS = re.compile(r"[0-9\\+*^=<>]")
_NOT_ONE_EXPRESSION = re.compile(r"\d\s+\d|\d\.\d*\.|\d\s*_|[*/+^_=-]\s*$")
_DATE_OR_RANGE = re.compile(r"\s*\d+(?:\s*-\s*\d+|(?:\s*[-/]\s*\d+){2,})\s*")
_INFINITE_BOUND = re.compile(r"(?:^|(?<=[(\[,<>]))\s*[+-]?\s*\\infty\s*(?=[,)\]<>]|$)")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}^]*)\}|([A-Za-z0-9])|(-\d)|\\circ)")
_ASSIGNMENT = re.compile(r"\s*[A-Za-z](?:_\w)?\s*=\s*([^=]+)")
_LONGEST_FORMULA, _DEEPEST = 200, 6


def same_open_answer(gold: str, answer: str) -> bool:
    """Return whether `answer` states the open answer `gold`.

    Numbers are compared as exact values. math-verify decides only where both sides are formulas: it would take the last
    number out of any text ("3 dogs" and "3 cats") and words for products of letters ("on" and "no"). Everything else is
    compared without differences of case, white space and final punctuation.
    """
    gold, answer = unwrap_open(gold), unwrap_open(answer)
    if not normalise(answer):
        return False
    first, second = read_quantity(gold), read_quantity(answer)
    if first is not None and second is not None:
        return first.equals(second)
    if normalise(gold) == normalise(answer):
        return True
    return _same_formula(_formula(gold), _formula(answer))


def unwrap_open(text: str) -> str:
    r"""Return `text` in half width without white space, emphasis, paired dollars, `\boxed{}` or `\( \)` around it."""
    text = half_width(text).strip(" \t\r\n*`").rstrip(".。").strip()
    if re.fullmatch(r"\\\(.*\\\)|\\\[.*\\\]", text, re.DOTALL):
        text = text[2:-2]
    paired = text.startswith("$") == text.endswith("$")
    return unwrap(text) if paired else text


def _formula(text: str) -> str:
    text = text.rstrip(" .,;:。")
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text).strip()


def _same_formula(gold: str, answer: str) -> bool:
    if max(len(gold), len(answer)) > _LONGEST_FORMULA or not _SIGN_OF_MATHEMATICS.search(gold):
        return False
    golds, answers = _split_list(gold), _split_list(answer)
    if len(golds) != len(answers):
        return False
    if len(golds) > 1:
        return all(same_open_answer(*pair) for pair in zip(golds, answers, strict=True))
    if "=" not in gold and (assigned := _ASSIGNMENT.fullmatch(answer)):
        return same_open_answer(gold, assigned[1])
    if "=" not in answer and (assigned := _ASSIGNMENT.fullmatch(gold)):
        return same_open_answer(assigned[1], answer)
    if set(_VARIABLE.findall(gold)) != set(_VARIABLE.findall(answer)):  # math-verify takes letters for units: 3m for 3
        return False
    if gold.count("=") != answer.count("=") or not (_is_formula(gold) and _is_formula(answer)):
        return False
    return same_formula(gold, answer)


def _split_list(text: str) -> list[str]:
    """Split at the commas outside brackets; a list is compared in its order."""
    parts = [""]
    for character, depth in zip(text, _depths(text), strict=True):
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _depths(text: str) -> Iterator[int]:
    """How many brackets are open behind each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)


def _is_formula(text: str) -> bool:
    """Whether it is one expression of mathematics that can be evaluated quickly: no towers, no large exponents."""
    if not _MATHEMATICAL.fullmatch(text) or _NOT_ONE_EXPRESSION.search(text) or _DATE_OR_RANGE.fullmatch(text):
        return False
    if "\\infty" in _INFINITE_BOUND.sub("", text) or (re.search(r"[=<>]", text) and not _VARIABLE.search(text)):
        return False
    exponents = list(_EXPONENT.finditer(text))
    if len(exponents) != text.count("^") or any(text[match.end() :].lstrip().startswith("^") for match in exponents):
        return False
    powers = [digits for match in exponents for digits in re.findall(r"\d+", match[0])]
    most = 16 if re.search(r"[)\]}]\s*\^", text) else 10_000  # of brackets, and of a number
    return (
        max(_depths(text), default=0) <= _DEEPEST
        and max(map(len, re.findall(r"\d+", text)), default=0) <= 30
        and max(map(len, powers), default=0) <= 4
        and math.prod(max(int(digits), 1) for digits in powers) <= most
    )


_SECONDS = 5.0


@lru_cache(maxsize=1024)
def same_formula(gold: str, answer: str) -> bool:
    """Return whether math-verify takes the LaTeX formulas for equal; False if it has to compute for more than seconds.

    Args:
        gold: the right formula, without dollar signs.
        answer: the stated formula, without dollar signs.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with at_most(_SECONDS, TimeoutException):
            parsed = [
                parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
                for text in (gold, answer)
            ]
            return bool(verify(*parsed, timeout_seconds=None))
    except (Exception, TimeoutException):
        return False


def states_answer(text: str, solution: Solution) -> bool:
    """Return whether the completion `text` states any answer of the kind that `solution` is, right or wrong."""
    return _stated(text, solution) is not None


def is_right(text: str, solution: Solution) -> bool:
    """Return whether the completion `text` states `solution` as its answer."""
    stated = _stated(text, solution)
    if solution.choices:
        return stated == solution.index
    if solution.index is not None:
        return stated == LETTERS[solution.index]
    return isinstance(stated, str) and same_open_answer(solution.text, stated)


def _stated(text: str, solution: Solution) -> str | int | None:
    """What a completion states: an option, where there are choices, or a letter, or an open answer."""
    visible = strip_thought(text)
    if solution.choices:
        return _chosen_option(visible, solution.choices)
    if solution.index is not None:
        return _stated_letter(visible, ())
    stated = answer_tag(visible)
    if stated is None and (statement := last_statement(visible, options=False)):
        stated = statement[0]
    return stated


def _chosen_option(visible: str, choices: Sequence[str]) -> int | None:
    """The 0-based option that a completion states, by letter before text; None if none, or not exactly one."""
    letter = _stated_letter(visible, choices)
    if letter is not None and (index := LETTERS.find(letter)) in range(len(choices)):
        return index
    stated = answer_tag(visible)
    if stated is None:
        return None
    matches = [index for index, choice in enumerate(choices) if normalise(choice) == normalise(stated)]
    return matches[0] if len(matches) == 1 else None


def _stated_letter(visible: str, choices: Sequence[str]) -> str | None:
    content, in_sentence = answer_tag(visible), False
    if content is None and (statement := last_statement(visible, options=True)) is not None:
        content, in_sentence = statement
    if content is None:
        return letter_in_parentheses(visible) or _letter_on_a_line(visible, choices)
    return read_letter(content, choices, in_sentence=in_sentence) or (None if choices else read_labelled(content))


def _letter_on_a_line(visible: str, choices: Sequence[str]) -> str | None:
    """The one capital letter that lines consist of, with its option's text or behind `Option`; None if not one."""
    letters = set()
    for line in map(unwrap, half_width(visible).splitlines()):
        if match := _BARE.match(line):
            letters.add(read_letter(line[match.end() :], choices))
    letters.discard(None)
    return letters.pop() if len(letters) == 1 else None
