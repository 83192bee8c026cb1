"""Decide whether two open answers are the same: texts, numbers, dates, lists, and formulas by math-verify."""

import logging
import math
import re
from contextlib import suppress
from datetime import datetime
from functools import lru_cache

from vgr_trl.processes import limit_seconds
from vgr_trl.rewards.phrases import (
    POLARITY,
    bracket_depths,
    cut_fillers,
    find_phrases,
    has,
    normalise,
    read_quantity,
    simplify_units,
    split_list,
    strip_article,
    strip_wrapping,
    to_half_width,
)

_LATEX_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "≤": r"\leq ", "≥": r"\geq ",
    "≠": r"\neq ", "±": r"\pm ", "∞": r"\infty ", "θ": r"\theta ", "°": r"^\circ ", "²": "^{2}", "³": "^{3}",
    "**": "^", r"\left": "", r"\right": "", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\displaystyle": "",
}  # fmt: skip
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt)\s?(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|\w))")
_FORMULA = re.compile(
    r"(?:\\(?:frac|sqrt|pi|cdot|times|div|pm|theta|alpha|beta|gamma|delta|lambda|mu|phi|omega|sin|cos|tan|cot|log|ln"
    r"|exp|circ|leq|geq|neq|le|ge|ne|lt|gt|cup|cap)(?![A-Za-z])|\\[{}]|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
    r"|[0-9.+\-*/^=<>(){}\[\],|_ ])+"
)
_MATH_SIGN = re.compile(r"[0-9\\+*^=<>/√π∞θαβ°×·÷±≤≥≠²³]|pi|sqrt")
_NOT_ONE_EXPRESSION = re.compile(
    r"\d\s+\d|\d\.\d*\.|\d\s*_|[*/+^_=-]\s*$|\d\s*\(\s*[\d.]+\s*\)|^\s*\d+(?:\s*-\s*\d+|(?:\s*[-/]\s*\d+){2,})\s*$"
)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}^]*)\}|([A-Za-z0-9])|(-\d)|\\circ)")
_NAME = re.compile(  # x, AB, \angle ABC, S_1, f(x), Area: no product such as 2x or ab
    r"(?=\s*[^\d\s])\s*(?:m?\\(?:angle|triangle|overline|vec)\s?\{?|\\?(?:sin|cos|tan)\s?|[∠△])?"
    r"(?:[A-Z]{1,4}|[a-zθαβγφ]|\\(?:theta|alpha|beta)|[A-Za-z]{4,})?\}?\d?'?(?:_\{?\w{1,3}\}?)?(?:\([A-Za-z\d]\))?\s*"
)
_AND = re.compile(r",?\s+and\s+|\s*(?:→|->|;)\s*|(?<=[\u4e00-\u9fff])和", re.IGNORECASE)
_DATES = ("%d %B %Y", "%d %b %Y", "%B %d %Y", "%b %d %Y", "%Y-%m-%d", "%Y/%m/%d", "%Y年%m月%d日")
# A comparison ignores the spaces of 1 : 3, the zero of 07:45, the dot of 4:15 p.m and the sign of +\infty.
_IGNORED = re.compile(r"(?<=[^\w\s])\s+|\s+(?=[^\w\s])|\b0(?=\d:\d\d)|(?<=\d [ap])\.(?=m)|\+(?=\\infty)")


@lru_cache(4096)
def read_gold(text: str) -> str:
    """Return an open reference without the words before its answer; yes or no if it begins with that."""
    text = to_half_width(text)
    return POLARITY.get(normalise(re.split(r"[,.;]", text)[0])) or cut_fillers(text)


def is_same_open_answer(gold: str, answer: str) -> bool:
    """Return whether `answer` states the open answer `gold`, as a whole or in one of its phrases."""
    return any(is_same_value(read_gold(gold), phrase) for phrase in find_phrases(to_half_width(answer)))


def is_value(text: str) -> bool:
    """Return whether a text is a number or a formula."""
    text = strip_wrapping(to_half_width(text))
    return read_quantity(text) is not None or bool(_MATH_SIGN.search(text) and _is_formula(_to_latex(text)))


@lru_cache(4096)
def is_same_value(gold: str, answer: str) -> bool:
    """Return whether two texts are the same open answer.

    Numbers are compared as exact values, lists part by part, in their order. math-verify decides only where both sides
    are formulas: it would take the last number out of any text and words for products of letters ("on" and "no").
    Everything else is compared without differences of case, article, white space and final punctuation.
    """
    gold, answer = strip_wrapping(to_half_width(gold)), strip_wrapping(to_half_width(answer))
    if not normalise(answer):
        return False
    first, second = read_quantity(gold), read_quantity(answer)
    if first and second:
        return first.equals(second)
    words = [_IGNORED.sub("", strip_article(text)) for text in (gold, answer)]
    if len({POLARITY.get(text, text) for text in words}) == 1:
        return True
    if not (first or _MATH_SIGN.search(gold) or re.search("[,、]", gold) or "=" in answer):  # words
        return False
    if (date := read_date(words[0])) and date == read_date(words[1]):
        return True
    if gold.count(",") > 1 and "=" not in answer:  # a list of several has any brackets or none
        gold, answer = (text.strip("[](){}\\ ") for text in (gold, answer))
    golds = split_list(_AND.sub(",", gold) if "," in gold else gold) if first is None else [gold]
    answers = split_list(_AND.sub(",", answer) if len(golds) > 1 else answer)
    if len(golds) != len(answers):
        return False
    return all(map(is_same_value, golds, answers)) if len(golds) > 1 else _is_same_expression(gold, answer)


def _is_same_expression(gold: str, answer: str) -> bool:
    answer = re.sub(r"≈|\\approx(?![a-z])", "=", answer)
    if has("joins", f"{gold} {answer}"):  # x = 3 or x = 5
        return False
    if ("=" in gold) != ("=" in answer) and not re.search(r"[<>!]", gold + answer):  # 24*24 = 576
        return is_same_value(_last_side(gold), _last_side(answer))
    if max(len(gold), len(answer)) > 200 or not (_MATH_SIGN.search(gold) and _MATH_SIGN.search(answer)):
        return False
    gold, answer = _to_latex(gold), _to_latex(answer)
    return (
        {*_VARIABLE.findall(gold)} == {*_VARIABLE.findall(answer)}  # math-verify takes letters for units: 3m for 3
        and _is_formula(gold)
        and _is_formula(answer)
        and is_same_formula(gold, answer)
    )


def read_date(text: str) -> datetime | None:
    """Parse a date that names its month or begins with its year."""
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|[,.]|\bof\b", " ", text)
    for form in _DATES if re.search(r"\d{4}", text) else ():
        with suppress(ValueError):
            return datetime.strptime(text, form)
    return None


def _to_latex(text: str) -> str:
    """Return a formula as LaTeX."""
    text = simplify_units(text)
    for sign, latex in _LATEX_SIGNS.items():
        text = text.replace(sign, latex)
    return _ROOT.sub(r"\\sqrt{\1\2\3}", text).strip()


def _last_side(text: str) -> str:
    """Return the last side of an equation; empty if another side is another number, or neither a name nor computed."""
    *others, last = text.split("=")
    is_named, number = len(others) > 1 and _NAME.fullmatch(others[0]), read_quantity(last)  # AC = AB + BC = 5
    for side in map(simplify_units, others):
        is_read = is_named or _NAME.fullmatch(side) or not re.search(r"(?<![A-Za-z\\])[A-Za-z]", side)
        read = read_quantity(side)
        if not is_read or (read and number and not read.equals(number)):
            return ""
    return last


def _is_formula(text: str) -> bool:
    """Whether `text` is one mathematical expression that is cheap to evaluate: no towers, no large exponents.

    Exponents of a bracket multiply the terms, and those of a variable the degree; those of a number are only computed.
    """
    if not _FORMULA.fullmatch(text) or _NOT_ONE_EXPRESSION.search(text):
        return False
    if re.search(r"[=<>]", text) and not _VARIABLE.search(text):
        return False
    exponents = list(_EXPONENT.finditer(text))
    if len(exponents) != text.count("^") or any(text[match.end() :].lstrip().startswith("^") for match in exponents):
        return False
    powers = [digits for match in exponents for digits in re.findall(r"\d+", match[0])]
    most = 10_000 if re.fullmatch(r"[\d.+\-*/^=(){} ]*|[^()]*\\(?:times|cdot)[^()A-Za-z]*", text) else 16
    return (
        max(bracket_depths(text), default=0) <= 6
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
    if gold.replace(" ", "") == answer.replace(" ", ""):
        return True
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    texts = [text + "+0" * bool(re.search(r"(?<![A-Za-z\\])[A-Za-z]$", text)) for text in (gold, answer)]  # no unit
    options = {"extraction_config": [LatexExtractionConfig()], "fallback_mode": "no_fallback", "parsing_timeout": None}
    try:
        with limit_seconds(_VERIFY_SECONDS, TimeoutException):
            return bool(verify(*(parse(f"${text}$", **options) for text in texts), timeout_seconds=None))
    except (Exception, TimeoutException):
        return False
