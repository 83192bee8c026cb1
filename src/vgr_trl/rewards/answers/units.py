"""The units that may stand behind a number: the one list of them, with their plurals."""

import re
import unicodedata

# One unit a line, its spellings separated by commas. Symbols of one letter, and those with milli or mega before one,
# count as they are written here; everything else in any case. No scale words: 5 k and 5 million are not 5.
_SPELLINGS = """
m, metre, metres, meter, meters, 米
km, kilometre, kilometres, kilometer, kilometers, kms, 千米, 公里
dm, decimetre, decimetres, decimeter, decimeters, 分米
cm, centimetre, centimetres, centimeter, centimeters, cms, 厘米
mm, millimetre, millimetres, millimeter, millimeters, 毫米
μm, micrometre, micrometres, micrometer, micrometers, micron, microns, 微米
nm, nanometre, nanometres, nanometer, nanometers, 纳米
in, inch, inches, 英寸
ft, foot, feet, 英尺
yd, yard, yards
mi, mile, miles, 英里
ha, hectare, hectares, 公顷
acre, acres
l, L, litre, litres, liter, liters, 升
dl, decilitre, decilitres, deciliter, deciliters
cl, centilitre, centilitres, centiliter, centiliters
ml, millilitre, millilitres, milliliter, milliliters, 毫升
gal, gallon, gallons
cup, cups
g, gram, grams, gramme, grammes, 克
kg, kilogram, kilograms, kilo, kilos, kgs, 千克, 公斤
mg, milligram, milligrams, 毫克
ton, tons
tonne, tonnes, 吨
lb, lbs, pound, pounds, 磅
oz, ounce, ounces
s, sec, secs, second, seconds, 秒
ms, millisecond, milliseconds, 毫秒
min, mins, minute, minutes, 分钟
h, hr, hrs, hour, hours, 小时
day, days, 天
week, weeks, 周
month, months, 个月
year, years, yr, yrs, 年
year old, years old, 岁
mph
kph
Hz, hertz
kHz, kilohertz
MHz, megahertz
GHz, gigahertz
N, newton, newtons, 牛, 牛顿
kN, kilonewton, kilonewtons
J, joule, joules, 焦, 焦耳
kJ, kilojoule, kilojoules, 千焦
MJ, megajoule, megajoules
mJ, millijoule, millijoules
cal, calorie, calories
kcal, kilocalorie, kilocalories
eV, electronvolt, electronvolts
W, watt, watts, 瓦
mW, milliwatt, milliwatts
kW, kilowatt, kilowatts, 千瓦
MW, megawatt, megawatts
kWh, kilowatt hour, kilowatt hours
Pa, pascal, pascals, 帕
mPa, millipascal, millipascals
kPa, kilopascal, kilopascals
MPa, megapascal, megapascals
atm
V, volt, volts, 伏
kV, kilovolt, kilovolts
mV, millivolt, millivolts
MV, megavolt, megavolts
A, amp, amps, ampere, amperes, 安
mA, milliamp, milliamps, milliampere, milliamperes
Ω, ohm, ohms, 欧, 欧姆
kΩ, kiloohm, kiloohms
mΩ, milliohm, milliohms
MΩ, megaohm, megaohms
C, coulomb, coulombs
F, farad, farads
mol, mole, moles
kelvin, kelvins
°, deg, degree, degrees, 度
°C, degree Celsius, degrees Celsius, Celsius, 摄氏度
°F, degree Fahrenheit, degrees Fahrenheit, Fahrenheit, 华氏度
rad, radian, radians
dB, decibel, decibels
ppm
rpm
px, pixel, pixels
pt, pts
kB, kilobyte, kilobytes
MB, megabyte, megabytes
GB, gigabyte, gigabytes
TB, terabyte, terabytes
unit, units
$, US$, USD, dollar, dollars, 美元
cent, cents
€, EUR, euro, euros, 欧元
£, GBP
¥, ￥
yen, JPY, 日元
元, CNY, RMB, yuan
₹, INR, rupee, rupees
月
日
分
个
人
只
块
"""
_LISTED = {spelling: line.split(", ")[0] for line in _SPELLINGS.strip().split("\n") for spelling in line.split(", ")}
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
