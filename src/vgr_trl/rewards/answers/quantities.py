"""Numbers as answers state them: exact values, so that no two different numbers count as equal."""

import re
from dataclasses import dataclass
from fractions import Fraction

from vgr_trl.rewards.answers.units import plain_units, read_unit

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
_LONGEST = 100
_FEWEST_DECIMALS, _FEWEST_DIGITS = 6, 5


@dataclass(frozen=True)
class Quantity:
    """A number, the unit it is given in ("" for none), and to how many decimals it is written (None for a fraction)."""

    value: Fraction
    unit: str = ""
    decimals: int | None = 0

    def equals(self, other: "Quantity") -> bool:
        """Return whether both are the same number; a unit that only one of them has is ignored.

        A fraction also equals its value rounded or cut to six or more decimals.
        """
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.value == other.value:
            return True
        written, exact = (self, other) if other.decimals is None else (other, self)
        if exact.decimals is not None or written.decimals is None or written.decimals < _FEWEST_DECIMALS:
            return False
        last_place = Fraction(1, 10**written.decimals)
        if (written.value < 0) != (exact.value < 0) or abs(written.value) < last_place * 10 ** (_FEWEST_DIGITS - 1):
            return False
        return -last_place / 2 <= abs(exact.value) - abs(written.value) < last_place


def read_quantity(text: str) -> Quantity | None:
    """Return the number that `text` consists of, with its unit if any; None if it is anything else.

    Args:
        text: decimal, number with thousands commas, scientific notation, fraction or percentage (5% is 0.05), with a
            currency sign or a unit of the list in `units.py`.
    """
    text = _MINUS.sub("-", plain_units(text)).strip().rstrip(" .,;:。")
    if len(text) > _LONGEST or not text.isprintable():
        return None
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
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


def _fraction(match: re.Match[str]) -> Quantity | None:
    above, below = int(match[2] or match[4]), int(match[3] or match[5])
    if below == 0:
        return None
    value = Fraction(above, below)
    return Quantity(-value if match[1] == "-" else value, "", None)
