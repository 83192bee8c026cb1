"""Whether an open answer is the right one: exact numbers, then math-verify, then normalised text."""

import re

from vgr_trl.rewards.answers.formulas import same_formula
from vgr_trl.rewards.answers.letters import unwrap
from vgr_trl.rewards.answers.quantities import read_quantity
from vgr_trl.rewards.answers.text import half_width, normalise

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
_LONGEST, _DEEPEST = 200, 6


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
    if len(gold) > _LONGEST or len(answer) > _LONGEST or not _SIGN_OF_MATHEMATICS.search(gold):
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
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _is_formula(text: str) -> bool:
    if not _MATHEMATICAL.fullmatch(text) or _NOT_ONE_EXPRESSION.search(text) or _DATE_OR_RANGE.fullmatch(text):
        return False
    if "\\infty" in _INFINITE_BOUND.sub("", text) or (re.search(r"[=<>]", text) and not _VARIABLE.search(text)):
        return False
    return _bracket_depth(text) <= _DEEPEST and _has_small_powers(text)


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _has_small_powers(text: str) -> bool:
    """Return whether evaluating `text` cannot take long: no towers of powers, no large exponents."""
    exponents = list(_EXPONENT.finditer(text))
    if len(exponents) != text.count("^"):
        return False
    product = 1
    for match in exponents:
        if text[match.end() :].lstrip().startswith("^"):
            return False
        for digits in re.findall(r"\d+", match[0]):
            if len(digits) > 4:
                return False
            product *= max(int(digits), 1)
    of_brackets = re.search(r"[)\]}]\s*\^", text) is not None
    return product <= (16 if of_brackets else 10_000) and max(map(len, re.findall(r"\d+", text)), default=0) <= 30
