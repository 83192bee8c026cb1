"""Numbers as answers state them: exact values, so that no two different numbers count as equal."""

import re
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?"
_QUANTITY = re.compile(
    rf"(?P<currency>[€£¥₹]|\$|\\\$)?\s?(?P<number>{_NUMBER})(?P<gap>\s*)(?P<unit>\S.*)?", re.IGNORECASE | re.DOTALL
)
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{(\d+)\}\s?\{(\d+)\})")
_WORD_UNIT = re.compile(r"(?:(?:square|cubic|sq\.?)\s)?[^\W\d_]+(?:[/.·][^\W\d_]+)?(?:\^\{?[23]\}?)?\.?")
_ATTACHED_UNITS = frozenset(
    "mm cm dm km nm kg mg ml cl kl ms min hr hrs kj kw kwh hz khz mhz ghz pa kpa mpa kn mol kph mph ft lb lbs oz usd "
    "eur ppm rpm db mb gb tb kb px pt am pm cm^2 cm^3 m^2 m^3 km^2 mm^2 km/h m/s cm/s g/ml kg/m "
    "元 个 米 厘米 千米 公里 克 千克 度 岁 人 天 年 月 日 分 秒 小时 分钟 只 块".split()
)
_LETTER_UNITS = frozenset("mgslhvawnjkcf")
_NOT_UNITS = frozenset(
    "hundred thousand million billion trillion dozen half third quarter pi sqrt squared cubed and or not times "
    "factorial over by plus minus to is are the of mod".split()
)
_LONGEST = 100


@dataclass(frozen=True)
class Quantity:
    """A number, the unit it is given in ("" for none), and to how many decimals it is written (None for a fraction)."""

    value: Fraction
    unit: str = ""
    decimals: int | None = 0

    def equals(self, other: "Quantity") -> bool:
        """Return whether both are the same number; a unit that only one of them has is ignored.

        A fraction also equals its value rounded or cut to six or more decimals, as in math-verify.
        """
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.value == other.value:
            return True
        written, exact = (self, other) if other.decimals is None else (other, self)
        if exact.decimals is not None or written.decimals is None or written.decimals < 6:
            return False
        difference = abs(self.value - other.value)
        return difference < Fraction(1, 10**written.decimals) and difference <= abs(exact.value) / 10**5


def read_quantity(text: str) -> Quantity | None:
    """Return the number that `text` consists of, with its unit if any; None if it is anything else.

    Args:
        text: decimal, number with thousands commas, scientific notation, fraction or percentage (5% is 0.05), with a
            currency sign or one word of a unit.
    """
    text = text.strip()
    if len(text) > _LONGEST or not text.isprintable():
        return None
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number = match["number"].replace(",", "").lower()
    mantissa, _, exponent = number.partition("e")
    value, decimals = Fraction(number), len(mantissa.partition(".")[2]) - int(exponent or 0)
    unit = (match["unit"] or "").casefold().rstrip(".")
    if unit in ("%", r"\%", "percent", "per cent") and not match["currency"]:
        return Quantity(value / 100, "", decimals + 2)
    if unit and not (_is_unit(unit, attached=not match["gap"]) and not match["currency"]):
        return None
    return Quantity(value, match["currency"] or unit, decimals)


def _fraction(match: re.Match[str]) -> Quantity | None:
    above, below = int(match[2] or match[4]), int(match[3] or match[5])
    if below == 0:
        return None
    value = Fraction(above, below)
    return Quantity(-value if match[1] == "-" else value, "", None)


def _is_unit(unit: str, *, attached: bool) -> bool:
    if unit in ("°", "°c", "°f", r"^\circ", r"^{\circ}"):
        return True
    if attached:
        return unit in _ATTACHED_UNITS
    return bool(_WORD_UNIT.fullmatch(unit)) and unit not in _NOT_UNITS and (len(unit) > 1 or unit in _LETTER_UNITS)
