"""Decide whether two open answers are the same: texts, numbers with units, lists, and formulas by math-verify.

`statements.toml` holds the words of each language, here those of numbers, yes and no, and articles.
"""

import logging
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

from vgr_trl.utils import limit_seconds

TABLES = tomllib.loads(Path(__file__).with_name("statements.toml").read_text(encoding="utf-8"))
POLARITY = {word: name for table in TABLES.values() for name in ("yes", "no") for word in table[name]}


def compile_words(name: str) -> re.Pattern[str]:
    """Compile the entries of all languages under `name` into one pattern."""
    entries = [table[name] for table in TABLES.values()]
    patterns = [part for entry in entries for part in ([entry] if isinstance(entry, str) else entry)]
    return re.compile("|".join(f"(?:{part})" for part in patterns), re.IGNORECASE | re.MULTILINE)


ARTICLES = compile_words("articles")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
_ZERO_WIDTH = dict.fromkeys((0x200B, 0x2060, 0xFEFF))  # invisible spaces and joiners
_EXCLAMATION_AFTER_WORD = re.compile(r"(?<=[^\W\d_]{2})[!?]+$")
MARKS, STOPS = " \t\r\n*`_\"'“”‘’「」", ".。,;:"
_WRAPPED = re.compile(
    r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|fbox)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|\\\((.*)\\\)|\\\[(.*)\\\]|\$\$?([^$]*)\$\$?|【(.*)】",
    re.DOTALL,
)


def to_half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, of the same length."""
    return text.translate(_FULL_WIDTH)


def fold(text: str) -> str:
    """Return `text` with normalised case, width, white space and accents, and without zero-width spaces."""
    return " ".join(to_half_width(unicodedata.normalize("NFC", text.translate(_ZERO_WIDTH))).casefold().split())


def normalise(text: str) -> str:
    """Return `text` folded (`fold`) and without final punctuation.

    Exclamation and question marks are removed only after a word, so that 5! stays. Punctuation alone stays.
    """
    collapsed = fold(text)
    stripped = collapsed.rstrip(STOPS).rstrip()
    while match := _EXCLAMATION_AFTER_WORD.search(stripped):
        stripped = stripped[: match.start()].rstrip(STOPS).rstrip()
    return stripped or collapsed


def strip_wrapping(text: str) -> str:
    r"""Return `text` without quotes, emphasis, `\boxed{}`, `\text{}`, dollars and final punctuation around it."""
    before = None
    while text != before:
        before, text = text, text.strip(MARKS)
        text = text.rstrip(STOPS).strip(MARKS) or text
        if text.endswith("}") and text.count("}") > text.count("{"):  # of JSON
            text = text[:-1]
        if match := _WRAPPED.fullmatch(text):
            text = next(part for part in match.groups() if part is not None)
    return text


@lru_cache(4096)  # the options of a question are compared again for each part of each completion
def strip_article(text: str) -> str:
    """Return `text` normalised, without a leading article or a trailing 的."""
    text = normalise(strip_wrapping(text)).removesuffix("的")
    match = ARTICLES.match(text)
    return (text[match.end() :].strip() or text) if match else text


# One unit per line: its name, then other spellings, separated by commas. Some match in any case, see below.
_LINES = Path(__file__).with_name("units.txt").read_text(encoding="utf-8").splitlines()
_UNITS = [line.split(", ") for line in _LINES if not line.startswith("#")]
_UNIT_NAMES = {spelling: unit[0] for unit in _UNITS for spelling in unit}
_FOLDED_UNIT_NAMES = {
    spelling.casefold(): name
    for spelling, name in _UNIT_NAMES.items()
    if len(spelling) > 1 and not (spelling[0] in "mM" and spelling[1:] in _UNIT_NAMES)  # milli or mega
}

_POWERS = {"square": "2", "sq": "2", "sq.": "2", "平方": "2", "cubic": "3", "立方": "3"}
_POWER_BEFORE = re.compile(r"(square|sq\.?|cubic)\s+|(平方|立方)", re.IGNORECASE)
_POWER_AFTER = re.compile(r"(?<=\S)\s?(?:\^\s?\{?([23])\}?|(?<=m)([23]))$")
_PER = re.compile(r"\s?/\s?|\s+per\s+", re.IGNORECASE)
_DEGREE = re.compile(r"\^?\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|[º˚]")
_LATEX_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mathbf|textbf|operatorname|rm)\s?\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\(?:quad|qquad)(?![A-Za-z])|(?<=\S)~")


def simplify_units(text: str) -> str:
    r"""Return `text` with degrees, spaces and texts of LaTeX as plain characters, such as 5 cm for `5\,\text{cm}`."""
    return _LATEX_TEXT.sub(r"\1", _LATEX_SPACE.sub(" ", _DEGREE.sub("°", text))).replace("²", "^2").replace("³", "^3")


def read_unit(text: str, *, attached: bool = False) -> str | None:
    """Return the canonical name of the unit that `text` spells; None if it is not listed.

    Args:
        text: a unit, also squared or cubed, also per another: `cm`, `square metres`, `km/h`, `m/s^2`.
        attached: whether the unit follows the number without a space; a single letter is then a variable, as in 5m.
    """
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    text = text[:-1] if text.endswith(".") else text
    if attached and re.fullmatch(r"[A-Za-z](?:\^\{?\d\}?)?", text) and not re.match(r"m\^", text):
        return None
    parts = [_read_unit_term(part) for part in _PER.split(text, maxsplit=1)]
    return None if None in parts else "/".join(filter(None, parts))


def _read_unit_term(text: str) -> str | None:
    before, behind = _POWER_BEFORE.match(text), _POWER_AFTER.search(text)
    if before and behind:
        return None
    base = text[before.end() :] if before else text[: behind.start()] if behind else text
    unit = _UNIT_NAMES.get(base) or (_FOLDED_UNIT_NAMES.get(base.casefold()) if len(base) > 1 else None)
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
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s)?(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{(\d+)\}\s?\{(\d+)\})")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_NUMBERS = [pair for table in TABLES.values() for pair in enumerate(table["numbers"])]
_NUMBER_WORDS = {word: number for number, words in _NUMBERS for word in words.split("|")}
_NUMBER_WORD_PATTERN = re.compile(
    rf"^(?:{'|'.join(sorted(_NUMBER_WORDS, key=len, reverse=True))})(?![A-Za-z0-9一二三四五六七八九十百千万点分])",
    re.IGNORECASE,
)
_COUNTED_NOUN = re.compile(  # nouns after a number, but no scale word and no second number
    r"(?!(?:or|and|to|plus|minus|times|by|out|over|hundred|thousand|[mbtr]+illion|dozen|half|halves|percent)s?\b)"
    r"[a-z]{2,}(?: [a-z]{2,}){0,2}"
    r"|[个只条辆人名位张把件种次块棵头匹双本朵支根颗粒座栋层台架艘](?P<noun>[\u4e00-\u9fff]{0,6})",
    re.IGNORECASE,
)
_PERCENT = frozenset(["%", r"\%", "percent", "per cent", "pct"])
_MINUS = re.compile("[−–‐‑﹣]")
_MAX_QUANTITY_LENGTH = 100
_MIN_DECIMALS, _MIN_DIGITS = 6, 10**4


@dataclass(frozen=True)
class Quantity:
    """A number, its unit ("" for none) and its number of decimals (None for a fraction)."""

    value: Fraction
    unit: str = ""
    decimals: int | None = 0

    def equals(self, other: "Quantity") -> bool:
        """Return whether both are the same number; a unit that only one of them has is ignored.

        A fraction also equals its value rounded or cut to six or more decimals, five of their digits at least.
        """
        if "" in (self.unit, other.unit) and "%" in (self.unit, other.unit):  # 50% is 0.5, and 50 of a hundred
            share, plain = (self, other) if self.unit else (other, self)
            hundredfold = Quantity(share.value * 100, decimals=(share.decimals or 0) - 2)
            return replace(share, unit="").equals(plain) or hundredfold.equals(plain)
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if (self.decimals is None) == (other.decimals is None):
            return self.value == other.value
        written, exact = (self, other) if other.decimals is None else (other, self)
        places = written.decimals or 0
        digits, scaled = (each.value * Fraction(10) ** places for each in (written, exact))
        if places < _MIN_DECIMALS or abs(digits) < _MIN_DIGITS:
            return digits == scaled
        return digits in (scaled, int(scaled), round(scaled))


def read_quantity(text: str) -> Quantity | None:
    """Parse `text` as a number with an optional unit; None if it is anything else.

    Args:
        text: decimal, number with thousands commas, scientific notation, fraction or percentage (5% is 0.05), with a
            currency sign or a unit of `units.txt`.
    """
    text = unicodedata.normalize("NFKC", _MINUS.sub("-", _VULGAR.sub(r" \g<0>", simplify_units(text))))
    text = _NUMBER_WORD_PATTERN.sub(
        lambda word: str(_NUMBER_WORDS[word[0].casefold()]), text.replace("⁄", "/").strip().rstrip(" .,;:。")
    )
    if len(text) > _MAX_QUANTITY_LENGTH or not text.isprintable():
        return None
    if match := _FRACTION.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        value = int(match[2] or 0) + Fraction(above, below or 1)
        return Quantity(-value if match[1] == "-" else value, decimals=None) if below else None
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
    if names == {None} and (counted := _COUNTED_NOUN.fullmatch(unit)):  # 3 dogs
        names = {counted["noun"] if counted["noun"] is not None else counted[0].casefold().removesuffix("s")}
    if currency:
        names.add(read_unit(currency.replace("\\", "")))
    return None if None in names or len(names) > 1 else Quantity(value, "".join(map(str, names)), decimals)


_LATEX_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "≤": r"\leq ", "≥": r"\geq ",
    "≠": r"\neq ", "±": r"\pm ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "°": r"^\circ ",
    "²": "^{2}", "³": "^{3}", "**": "^", r"\left": "", r"\right": "", r"\dfrac": r"\frac", r"\tfrac": r"\frac",
}  # fmt: skip
_COMMANDS = (
    "frac|sqrt|pi|cdot|times|div|pm|infty|theta|alpha|beta|gamma|delta|lambda|mu|phi|omega|sin|cos|tan|cot|log|ln|exp|"
    "circ|leq|geq|neq|le|ge|ne|lt|gt|cup|cap"
)
_MATH_EXPRESSION = re.compile(
    rf"(?:\\(?:{_COMMANDS})(?![A-Za-z])|\\[{{}}]|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|[0-9.+\-*/^=<>(){{}}\[\],|_ ])+"
)
_MATH_SIGN = re.compile(r"[0-9\\+*^=<>/]")
_NOT_ONE_EXPRESSION = re.compile(r"\d\s+\d|\d\.\d*\.|\d\s*_|[*/+^_=-]\s*$")
_DATE_OR_RANGE = re.compile(r"\s*\d+(?:\s*-\s*\d+|(?:\s*[-/]\s*\d+){2,})\s*")
_INFINITE_BOUND = re.compile(r"(?:^|(?<=[(\[,<>]))\s*[+-]?\s*\\infty\s*(?=[,)\]<>]|$)")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}^]*)\}|([A-Za-z0-9])|(-\d)|\\circ)")
_LAST_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]$")
_PRODUCT = re.compile(r"(?<![A-Za-z\\])([A-Za-z])(?=[a-z](?![A-Za-z]))")
_ASSIGNMENT = re.compile(r"\s*[A-Za-z]'?(?:_\w)?\s*=\s*([^=]+)")
_MAX_FORMULA_LENGTH, _MAX_DEPTH = 200, 6


def is_same_open_answer(gold: str, answer: str) -> bool:
    """Return whether `answer` states the open answer `gold`.

    Numbers are compared as exact values, lists part by part, in their order. math-verify decides only where both sides
    are formulas: it would take the last number out of any text and words for products of letters ("on" and "no").
    Everything else is compared without differences of case, article, white space and final punctuation.
    """
    gold, answer = strip_wrapping(to_half_width(gold)), strip_wrapping(to_half_width(answer))
    if not normalise(answer):
        return False
    first, second = read_quantity(gold), read_quantity(answer)
    if first is not None and second is not None:
        return first.equals(second)
    if len({POLARITY.get(text, text) for text in (strip_article(gold), strip_article(answer))}) == 1:
        return True
    if gold.startswith("[") != answer.startswith("["):  # a list with its brackets, and one without
        gold, answer = gold.strip("[]"), answer.strip("[]")
    golds = _split_list(gold)
    answers = _split_list(_AND.sub(",", answer) if len(golds) > 1 else answer)
    if len(golds) > 1 and len(golds) == len(answers):
        return all(is_same_open_answer(*pair) for pair in zip(golds, answers, strict=True))
    return len(golds) == len(answers) and _is_same_formula(_to_latex(gold), _to_latex(answer))


def _to_latex(text: str) -> str:
    for sign, latex in _LATEX_SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"√\s?(?:\(([^()]*)\)|(\w))", r"\\sqrt{\1\2}", text)
    text = _PRODUCT.sub(r"\1 ", text) if re.search(r"[=^\\]", text) else text
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text).strip()


def _is_same_formula(gold: str, answer: str) -> bool:
    if max(len(gold), len(answer)) > _MAX_FORMULA_LENGTH or not _MATH_SIGN.search(gold):
        return False
    if "=" not in gold and (assigned := _ASSIGNMENT.fullmatch(answer)):
        return is_same_open_answer(gold, assigned[1])
    if "=" not in answer and (assigned := _ASSIGNMENT.fullmatch(gold)):
        return is_same_open_answer(assigned[1], answer)
    if set(_VARIABLE.findall(gold)) != set(_VARIABLE.findall(answer)):  # math-verify takes letters for units: 3m for 3
        return False
    if gold.count("=") != answer.count("=") or not (_is_formula(gold) and _is_formula(answer)):
        return False
    return is_same_formula(gold, answer)


_AND = re.compile(r",?\s+and\s+|\s*(?:→|->)\s*|(?<=[\u4e00-\u9fff])和", re.IGNORECASE)


def _split_list(text: str) -> list[str]:
    """Split at the commas outside brackets; a list is compared in its order."""
    depths = enumerate(zip(text, _bracket_depths(text), strict=True))
    commas = [place for place, (character, depth) in depths if character in ",、" and depth == 0]
    return [text[start + 1 : end] for start, end in pairwise([-1, *commas, len(text)])]


def _bracket_depths(text: str) -> Iterator[int]:
    """Yield the number of open brackets after each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)


def _is_formula(text: str) -> bool:
    """Whether `text` is one mathematical expression that is cheap to evaluate: no towers, no large exponents."""
    if not _MATH_EXPRESSION.fullmatch(text) or _NOT_ONE_EXPRESSION.search(text) or _DATE_OR_RANGE.fullmatch(text):
        return False
    if "\\infty" in _INFINITE_BOUND.sub("", text) or (re.search(r"[=<>]", text) and not _VARIABLE.search(text)):
        return False
    exponents = list(_EXPONENT.finditer(text))
    if len(exponents) != text.count("^") or any(text[match.end() :].lstrip().startswith("^") for match in exponents):
        return False
    powers = [digits for match in exponents for digits in re.findall(r"\d+", match[0])]
    most = 16 if re.search(r"[)\]}]\s*\^", text) else 10_000  # of brackets, and of a number
    return (
        max(_bracket_depths(text), default=0) <= _MAX_DEPTH
        and max(map(len, re.findall(r"\d+", text)), default=0) <= 30
        and max(map(len, powers), default=0) <= 4
        and math.prod(max(int(digits), 1) for digits in powers) <= most
    )


_VERIFY_SECONDS = 5.0


@lru_cache(maxsize=1024)
def is_same_formula(gold: str, answer: str) -> bool:
    """Return whether math-verify considers two LaTeX formulas equal; False if it takes more than 5 seconds.

    Args:
        gold: the right formula, without dollar signs.
        answer: the stated formula, without dollar signs.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with limit_seconds(_VERIFY_SECONDS, TimeoutException):
            gold, answer = (text + "+0" * bool(_LAST_VARIABLE.search(text)) for text in (gold, answer))  # no unit
            parsed = [
                parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
                for text in (gold, answer)
            ]
            return bool(verify(*parsed, timeout_seconds=None))
    except (Exception, TimeoutException):
        return False
