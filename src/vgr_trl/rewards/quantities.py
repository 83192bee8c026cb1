"""Read numbers with units, such as `3.5 million dollars`; `units.txt` lists the units."""

import re
import unicodedata
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from vgr_trl.rewards.language import TABLES

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
_DEGREE = re.compile(r"\*?\^?\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|[º˚]")
_LATEX_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mathbf|textbf|operatorname|rm)\s?\{([^{}]*)\}")
_SUPERSCRIPTS, _PLAIN_DIGITS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_THOUSANDS = re.compile(r"(?<=\d)(?:[\u202f\u2009]|\\,|\{,\})(?=\d{3}(?!\d))")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\(?:quad|qquad)(?![A-Za-z])|(?<=\S)~|~(?=[A-Za-z])")


def simplify_units(text: str) -> str:
    r"""Return `text` with degrees, spaces, texts and powers as plain characters, such as 5 cm for `5\,\text{cm}`."""
    text = _LATEX_TEXT.sub(r"\1", _LATEX_SPACE.sub(" ", _DEGREE.sub("°", _THOUSANDS.sub("", text))))
    return _SUPERSCRIPTS.sub(lambda digits: f"^{{{digits[0].translate(_PLAIN_DIGITS)}}}", text)


def read_unit(text: str, *, attached: bool = False) -> str | None:
    """Return the canonical name of the unit that `text` spells; None if it is not listed.

    Args:
        text: a unit, also squared or cubed, also per another: `cm`, `square metres`, `km/h`, `m/s^2`.
        attached: whether the unit follows the number without a space; a single letter is then a variable, but not m.
    """
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    text = text[:-1] if text.endswith(".") else text
    if attached and re.fullmatch(r"[A-Za-ln-z](?:\^\{?\d\}?)?", text):
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


_NUMBER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_POWER_OF_TEN = r"[eE](?P<exponent>[+-]?\d{1,2})|\s?(?:×|\\times|\\cdot|[*·x])\s?10\s?\^\s?"
_POWER_OF_TEN += r"(?P<power>-?\d{1,2}|\{\s?[+-]?\d{1,2}\s?\})"
_QUANTITY = re.compile(
    r"(?:(?P<before>[+-])?(?P<currency>[€£¥￥₹]|(?:US)?\\?\$)\s?)?"
    rf"(?P<sign>[+-])?(?P<number>{_NUMBER})(?:{_POWER_OF_TEN})?(?P<gap>\s*)(?P<unit>\S.*)?",
    re.DOTALL,
)
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s)?(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{(\d+)\}\s?\{(\d+)\})")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_NUMBERS = [pair for table in TABLES.values() for pair in enumerate(table.get("numbers", ()))]
_NUMBER_WORDS = {word: number for number, words in _NUMBERS for word in words.split("|")}
_NUMBER_WORD_PATTERN = re.compile(
    rf"^(?:{'|'.join(sorted(_NUMBER_WORDS, key=len, reverse=True))})(?![A-Za-z0-9一二三四五六七八九十百千万点分])",
    re.IGNORECASE,
)
_ENGLISH_NUMBERS = "|".join(filter(str.isascii, _NUMBER_WORDS))
_COUNTED_NOUN = re.compile(  # nouns after a number, but no scale word and no second number
    rf"(?!(?:{_ENGLISH_NUMBERS}|in|on|at|of|for|vs|per|less|tops|oder|ou|und|et|unless|would|does|do|can|could|may|is|are|was|were|has|have|it|so|as|if|or|and|to|plus|minus|times|by|out|over"
    r"|hundred|thousand|[mbtr]+illion|dozen|half|halves|squared|cubed|percent|alias|more than)s?\b)"
    r"[a-z]{2,}(?: [a-z]{2,}){0,2}"
    r"|[个只条辆人名位张把件种次块棵头匹双本朵支根颗粒座栋层台架艘](?P<noun>(?!以)[\u4e00-\u9fff]{0,6})",
    re.IGNORECASE,
)
_PERCENT = frozenset(["%", r"\%", "percent", "per cent", "pct"])
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "千": 3, "万": 4, "百万": 6, "亿": 8}
_SCALE = re.compile(rf"\s?({'|'.join(_SCALES)})(?![A-Za-z])\s?", re.IGNORECASE)
_MINUS = re.compile("[−–‐‑﹣]")
_MAX_QUANTITY_LENGTH = 100
_MIN_DECIMALS, _MIN_DIGITS, _MAX_DECIMALS = 6, 10**4, 15


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


@lru_cache(4096)
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
    unit, currency = match["unit"] or "", match["currency"]
    exponent = int((match["exponent"] or match["power"] or "0").strip("{} "))
    if scale := _SCALE.match(unit):
        unit, exponent = unit[scale.end() :], exponent + _SCALES[scale[1].casefold()]
    number = match["number"].replace(",", "")
    if len(number.partition(".")[2]) >= _MAX_DECIMALS:  # 1.2000000000000002, computed in floats
        number = str(round(Decimal(number), _MAX_DECIMALS - 3))
    decimals = len(number.partition(".")[2]) - exponent
    value = Fraction(number) * Fraction(10) ** exponent
    if "-" in (match["before"], match["sign"]):
        value = -value
    if unit.casefold() in _PERCENT and not currency:
        return Quantity(value / 100, "%", decimals + 2)
    names = {read_unit(unit, attached=not match["gap"] and not scale)} if unit else set()
    if (
        names == {None} and (match["gap"] or not unit.isascii()) and (counted := _COUNTED_NOUN.fullmatch(unit))
    ):  # 3 dogs
        names = {counted["noun"] if counted["noun"] is not None else counted[0].casefold().removesuffix("s")}
    if currency:
        names.add(read_unit(currency.replace("\\", "")))
    return None if None in names or len(names) > 1 else Quantity(value, "".join(map(str, names)), decimals)
