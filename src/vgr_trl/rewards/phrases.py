"""Words of `statements.toml`, numbers with units, and the phrases of a clause that may be its answer."""

import re
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

_HERE = Path(__file__)
TABLES = tomllib.loads(_HERE.with_name("statements.toml").read_text(encoding="utf-8"))
# An English word may stand right behind an ideograph.
WORDS = {name: re.compile(f"(?a:{words})", re.IGNORECASE | re.MULTILINE) for name, words in TABLES["words"].items()}
POLARITY = {word: name for name in ("yes", "no") for word in TABLES["words"][name].split("|")}

_HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " ", 0xA0: " "}
_HALF_WIDTH |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), "")  # invisible spaces and joiners
MARKS, STOPS = " \t\r\n*`_\"'“”‘’「」«»《》", ".。,;:"
_END = re.compile(rf"(?:[{STOPS}\s]|(?<=[^\W\d_]{{2}})[!?])+\Z")  # "5!" keeps its sign
_WRAPPED = re.compile(
    r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|fbox)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|\\\((.*)\\\)|\\\[(.*)\\\]|\$\$?([^$]*)\$\$?|【(.*)】",
    re.DOTALL,
)


def to_half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, without zero-width characters."""
    return text if text.isascii() else text.translate(_HALF_WIDTH)


def fold(text: str) -> str:
    """Return `text` with normalised case, width, white space and accents, and without zero-width spaces."""
    return " ".join(to_half_width(unicodedata.normalize("NFC", text)).casefold().split())


@lru_cache(4096)  # parts of a completion are compared with each option
def normalise(text: str) -> str:
    """Return `text` folded (`fold`) and without final punctuation, unless it is nothing else."""
    folded = fold(text)
    return _END.sub("", folded) or folded


@lru_cache(4096)
def strip_wrapping(text: str) -> str:
    r"""Return `text` without quotes, emphasis, `\boxed{}`, `\text{}`, dollars and final punctuation around it."""
    before = None
    while text != before:
        before, text = text, text.strip(MARKS)
        text = text.rstrip(STOPS).strip(MARKS) or text
        if match := _WRAPPED.fullmatch(text):
            text = next(part for part in match.groups() if part is not None)
    return text


@lru_cache(4096)
def strip_article(text: str) -> str:
    """Return `text` normalised, without a leading article or a trailing 的."""
    text = normalise(strip_wrapping(text)).removesuffix("的")
    match = WORDS["articles"].match(text)
    return (text[match.end() :].strip() or text) if match else text


_UNIT_LINES = [line for line in _HERE.with_name("units.txt").read_text("utf-8").splitlines() if line[0] != "#"]
_UNIT_NAMES = {
    word: unit.split(", ")[0] for line in _UNIT_LINES for unit in line.split("; ") for word in unit.split(", ")
}
_FOLDED_UNIT_NAMES = {
    word.casefold(): name
    for word, name in _UNIT_NAMES.items()
    if len(word) > 1 and not (word[0] in "mM" and word[1:] in _UNIT_NAMES)  # milli or mega
}
_UNIT = re.compile(
    r"(?:(?P<square>(?:square|sq\.?)\s+|平方)|(?P<cube>cubic\s+|立方))?(?P<base>.+?)"
    r"(?:\s?\^\s?\{?(?P<power>[23])\}?|(?<=m)(?P<plain>[23]))?",
    re.IGNORECASE,
)
_INVERSE = re.compile(r"(?:^|\s|(?<=[a-z])\\cdot\s?)([A-Za-z]+)\s?\^\s?\{?-(?:1|([23]))\}?$")  # m s^{-2}
_SIMPLER: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"(?<=\d)(?:[\u202f\u2009]|\\,|\{,\})(?=\d{3}(?!\d))"), ""),  # thousands
    (re.compile(r"\*?\^?\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|[º˚]"), "°"),
    (re.compile(r"\\[,;:! ]|\\(?:quad|qquad)(?![A-Za-z])|(?<=\S)~|~(?=[A-Za-z])"), " "),
    (re.compile(r"\\(?:text|textrm|mathrm|mathbf|textbf|operatorname|rm)\s?\{([^{}]*)\}"), r"\1"),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), lambda digits: f"^{{{unicodedata.normalize('NFKC', digits[0]).replace('−', '-')}}}"),
    (re.compile(r"\\Omega(?![a-z])"), "Ω"),
]  # fmt: skip


def simplify_units(text: str) -> str:
    r"""Return `text` with degrees, spaces, texts and powers as plain characters, such as 5 cm for `5\,\text{cm}`."""
    for pattern, plain in _SIMPLER:
        text = pattern.sub(plain, text)
    return text


def read_unit(text: str, *, attached: bool = False) -> str | None:
    """Return the name of the unit that `text` spells, also squared or per another; None if it is not listed.

    Args:
        text: a unit: `cm`, `square metres`, `km/h`, `m/s^2`.
        attached: whether the unit follows the number without a space; a single letter is then a variable, but not m.
    """
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    if attached and re.fullmatch(r"[A-Za-ln-z](?:\^\{?\d\}?)?", text):
        return None
    text = _INVERSE.sub(lambda match: f"/{match[1]}" + f"^{match[2]}" * bool(match[2]), text)
    names = []
    for part in re.split(r"\s?/\s?|\s+per\s+", text, maxsplit=1):
        match = _UNIT.fullmatch(part)
        word = match["base"] if match else ""
        name = _UNIT_NAMES.get(word) or (len(word) > 1 and _FOLDED_UNIT_NAMES.get(word.casefold())) or ""
        if part and not name:
            return None
        power = match and ("2" if match["square"] else "3" if match["cube"] else match["power"] or match["plain"])
        names.append(f"{name}^{power}" if power else name)
    return "/".join(names)


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_HANZI = ["零", *"一二三四五六七八九"]
_NUMBER_WORDS = {word: number for number, word in enumerate(_ONES)} | {"两": 2, "零": 0, "dozen": 12, "a dozen": 12}
for _number in range(1, 100):
    _ten, _one = divmod(_number, 10)
    _NUMBER_WORDS[(_HANZI[_ten] if _ten > 1 else "") + "十" * bool(_ten) + (_HANZI[_one] if _one else "")] = _number
    if _ten > 1:
        _NUMBER_WORDS[_TENS[_ten - 2] + (f"-{_ONES[_one]}" if _one else "")] = _number
_WORD_PATTERN = "|".join(sorted(_NUMBER_WORDS, key=len, reverse=True))
_NUMBER_WORD = re.compile(rf"(?:{_WORD_PATTERN})(?![A-Za-z0-9一二三四五六七八九十百千万亿点分-])", re.IGNORECASE)
_QUANTITY = re.compile(
    r"(?:(?P<before>[+-])?(?P<currency>[€£¥￥₹]|(?:US)?\\?\$|(?:USD|EUR|GBP|INR|CNY)(?= ?\d))\s?)?(?P<sign>[+-])?"
    r"(?P<number>[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[+-]?\d{1,2})|\s?(?:×|\\times|\\cdot|[*·x])\s?10\s?\^\s?(?P<power>-?\d{1,2}|\{\s?[+-]?\d{1,2}\s?\}))?"
    r"(?P<gap>\s*)(?P<unit>\S.*)?",
    re.DOTALL,
)
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s)?(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{?(\d+)\}?\s?\{?(\d+)\}?)")
_COUNTED_NOUN = re.compile(  # nouns after a number, but no scale, second number or word that says something else
    rf"(?!(?:{_WORD_PATTERN}|in|on|at|of|for|vs|per|less|unless|would|does|do|can|could|may|is|are|was|were|has|have|it"
    r"|so|as|if|or|and|to|plus|minus|negative|times|by|out|over|hundred|thousand|[mbtr]+illion|bn|mn|crores?|lakhs?|score"
    r"|gross|pairs?|half|halves|quarters?|squared|cubed|pct|percent|alias|more than|oder|ou|und|et|tops)s?\b)"
    r"(?![a-z]*(?:[dnhrf]ths?|fold)\b)[a-z]{2,}(?: [a-z]{2,}){0,2}"
    r"|[个只条辆人名位张把件种次块棵头匹双本朵支根颗粒座栋层台架艘個枚羽冊](?P<noun>(?!以)[\u4e00-\u9fff]{0,6})",
    re.IGNORECASE,
)
_PERCENT = frozenset(["%", r"\%", "percent", "per cent"])
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "千": 3, "万": 4, "百万": 6, "亿": 8}
_SCALE = re.compile(rf"\s?({'|'.join(_SCALES)})(?![A-Za-z])\s?", re.IGNORECASE)


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
        places = (other.decimals if self.decimals is None else self.decimals) or 0
        scaled = [each.value * Fraction(10) ** places for each in (self, other)]
        digits, exact = scaled if other.decimals is None else scaled[::-1]
        return digits == exact or (places >= 6 and abs(digits) >= 10**4 and digits in (int(exact), round(exact)))


@lru_cache(4096)
def read_quantity(text: str) -> Quantity | None:
    """Parse `text` as a number with an optional unit; None if it is anything else.

    Args:
        text: decimal, number with thousands commas, scientific notation, fraction or percentage (5% is 0.05), number
            word to 99, with a currency sign, a unit of `units.txt` or counted things.
    """
    if len(text) > 100 or not text.isprintable():
        return None
    text = simplify_units(re.sub("[−–‐‑﹣]", "-", text))
    text = (
        unicodedata.normalize("NFKC", re.sub("[¼-¾⅐-⅞]", r" \g<0>", text)).replace("⁄", "/").strip().rstrip(" .,;:。")
    )
    if word := _NUMBER_WORD.match(text):
        text = str(_NUMBER_WORDS[word[0].casefold()]) + text[word.end() :]
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
    if len(number.partition(".")[2]) >= 15:  # 1.2000000000000002, computed in floats
        number = str(round(Decimal(number), 12))
    decimals = len(number.partition(".")[2]) - exponent
    value = Fraction(number) * Fraction(10) ** exponent * (-1 if "-" in (match["before"], match["sign"]) else 1)
    if unit.casefold() in _PERCENT and not currency:
        return Quantity(value / 100, "%", decimals + 2)
    names = {read_unit(unit, attached=not match["gap"] and not scale)} if unit else set()
    counted = _COUNTED_NOUN.fullmatch(unit) if names == {None} and (match["gap"] or not unit.isascii()) else None
    if counted:  # 3 dogs
        names = {counted["noun"] if counted["noun"] is not None else counted[0].casefold().removesuffix("s")}
    if currency:
        names.add(read_unit(currency.replace("\\", "")))
    return None if None in names or len(names) > 1 else Quantity(value, "".join(map(str, names)), decimals)


_EMPHASISED = re.compile(
    r"\*\*(.+?)\*\*(?!\s*:)|\\\((.+?)\\\)|\$([^$]+)\$|[“「\"](.+?)[”」\"]|(?<![\w*])\*([^\s*][^*]*)\*(?![\w*])"
)
_NUMBER_START = re.compile(r"(?:(?<=[a-z] )|(?<=[\u4e00-\u9fff]{2})|(?<=[\u4e00-\u9fff]{2} ))[-+$€£¥]{0,2}\d")
_COUNTED = re.compile(r"([\w$€£.,]+ (?!(?:in|at|of|to|per) )[a-z-]+) (?=(?!than\b)[a-z])", re.IGNORECASE)  # 4 men who
_DATE_COMMA = re.compile(r"\b([A-Z][a-z]{2,8} \d{1,2}|of [A-Z][a-z]{2,8}), (?=\d{4}\b)")
_REMARK = re.compile(
    r"(?<=\w)(\*{0,2}) ?\((?!or\b|alternatively|maybe|或|也)"
    r"(?:[^()]*[a-z]{2}[^()]* [^()]*|[^()=]+=[^()=]+|(?<=[a-z] \()[\d.,]+ ?(?:%|[a-z]+))\)[\s.*]*$"
)
_COMPUTED = re.compile(
    r"\d[\d.,]*(?: (?:plus|minus|times|multiplied by|divided by|[-−+*/×÷]) \d[\d.,]*)+", re.IGNORECASE
)
_REASON = re.compile(  # behind a space or a stop; a denial behind a stop
    rf"(?<=[^\s,;:(。])(?:[\s,;:(。]+(?a:{WORDS['reasons'].pattern})|\s*[,;:(。][\s,;:(。]*(?a:{WORDS['denies'].pattern}))",
    re.IGNORECASE | re.MULTILINE,
)
_RESTATED = re.compile(r"(\w+) \((\w+)\)")
_QUOTED = re.compile(r"[“「\"].+?[”」\"]")


def cut_fillers(text: str) -> str:
    """Return `text` without the words before its answer, such as `So there are about`."""
    for _ in range(5):
        text = text.lstrip(MARKS + ":,—≈~=#∴→⇒")
        match = WORDS["fillers"].match(text)
        if match is None or not strip_wrapping(text[match.end() :]):
            break
        text = text[match.end() :]
    return text


def cut_reason(text: str) -> str:
    """Return `text` without the reason behind its answer."""
    reason = _REASON.search(text)
    return text[: reason.start()] if reason else text


_SAYS = re.compile(rf"(?a:\b(?:{'|'.join(filter(str.isascii, POLARITY))})\b)|[是对正有否不错没]", re.IGNORECASE)


def find_polarity(clause: str) -> set[str]:
    """Return `yes` and `no` if parts of a clause are nothing but that."""
    if not _SAYS.search(clause):
        return set()
    pieces = [piece for piece in re.split(r"[,.;:。!]|\s[-–—]\s", clause) if len(piece) <= 40]
    return {
        POLARITY[word]
        for piece in pieces
        for word in map(strip_article, (piece, cut_fillers(piece)))
        if word in POLARITY
    }


def why_no_value(clause: str) -> str:
    """Return why a clause states no single value, empty if it does."""
    if polarity := find_polarity(clause):
        return "two answers" if len(polarity) == 2 else ""
    clause = WORDS["so"].split(cut_reason(clause))[-1]
    is_denied = WORDS["denies"].search(_QUOTED.sub("", clause)) or WORDS["refuses"].search(clause)
    return "a denial or refusal" if is_denied or WORDS["supposes"].search(clause) else ""


@lru_cache(4096)
def find_phrases(clause: str) -> tuple[str, ...]:
    """Return a clause and the phrases that say its answer, each within the one before: `It is a cat`, `a cat`, `cat`.

    They depend on the clause alone. One that denies, refuses or supposes says nothing but itself.
    """
    clause = _RESTATED.sub(_drop_restated, re.sub(r"(\d) ?\$(\\[^$]*|[a-z])\$", r"\1 \2", clause))  # 16 $\pi$
    cut = _REMARK.sub(r"\1", WORDS["so"].split(cut_reason(_DATE_COMMA.sub(r"\1 ", clause)))[-1])
    shorter = [] if why_no_value(clause) else find_polarity(clause) or [cut, *_shorten(cut)]
    return tuple(dict.fromkeys(filter(strip_article, (clause, *map(strip_wrapping, shorter)))))


def _drop_restated(match: re.Match[str]) -> str:
    """Return `three` for `three (3)`."""
    first, second = map(read_quantity, match.groups())
    return match[1] if first and first == second else match[0]


def _shorten(clause: str) -> Iterator[str]:
    """Yield the phrase behind the last verb, else the end of the clause; then shorter phrases within it.

    The only emphasised words end the search. Bounds and comparisons (`more than 20`) stay whole.
    """
    opened = cut_fillers(clause)
    phrase, is_said = opened, bool(WORDS["verbs"].search(clause[: len(clause) - len(opened)]))
    if not is_said and (verbs := list(WORDS["verbs"].finditer(opened))):
        phrase, is_said = cut_fillers(opened[verbs[-1].end() :]), True
        subject = opened[: verbs[-1].start()]
        if read_quantity(opened.split(" ")[0]) and not re.search(r"\d", phrase):  # 50% of them are red
            phrase = subject
        elif read_quantity(opened.split(" ")[0]) and not _COMPUTED.fullmatch(subject.strip()):
            phrase = ""
    head, *further = re.split(r"(?<![\d\s]): ", phrase)
    if further and (amount := read_quantity(cut_fillers(head))) and amount.unit:  # 5 people: 3 men and 2 women
        phrase = head
    elif further:
        phrase, is_said = further[-1], True
    if WORDS["joins"].search(phrase):
        return
    phrase = _first_part(phrase)
    matches = list(_EMPHASISED.finditer(clause))
    if matches and "=" in clause[matches[-1].end() :]:  # a side of an equation
        matches = []
    bold, marked = {match[1] for match in matches} - {None}, {next(filter(None, match.groups())) for match in matches}
    if len(bold) == 1 or (len(marked) == 1 and (min(marked) in phrase or not is_said)):
        match = next(match for match in matches if match[1] or len(bold) != 1)
        yield from [phrase] * (match[0].rstrip(MARKS + STOPS) in phrase) + [next(filter(None, match.groups()))]
        return
    is_bound = WORDS["bounds"].search(phrase)
    starts = [] if is_said or is_bound else list(_NUMBER_START.finditer(phrase))
    if starts and len(re.findall(r"\d[\d.,:/]*|[=<>\\^]", phrase)) == 1:
        before = phrase[: starts[-1].start()]
        is_joined = any(map(read_quantity, before.split())) or re.search(
            r"(?:\b(?:and|or|also|to|minus|negative)|和|或|负)\s*$", before
        )
        phrase = phrase if is_joined else phrase[starts[-1].start() :]
    yield phrase
    counted = _COUNTED.match(phrase)
    if counted and read_quantity(counted[1]) and not re.match(r"and\b", phrase[counted.end() :]):
        yield counted[1]
        return
    while not is_bound and (lead := WORDS["leads"].match(phrase)) and strip_wrapping(phrase[lead.end() :]):
        phrase = phrase[lead.end() :]
        yield phrase
    while place := WORDS["places"].search(phrase):
        phrase = phrase[: place.start()]
        yield phrase


def _first_part(phrase: str) -> str:
    """Return a phrase up to its first comma, unless its parts are a list."""
    pieces = split_list(phrase.rstrip(MARKS + STOPS))
    is_list = all(len(piece.split()) <= 4 and not WORDS["verbs"].search(piece) for piece in pieces)
    articles = [WORDS["articles"].match(piece.strip()) is not None for piece in pieces]
    return phrase if is_list and (len(pieces) > 2 or articles != [False, True]) else pieces[0]


def split_list(text: str) -> list[str]:
    """Split at the commas outside brackets; a list is compared in its order."""
    depths = enumerate(zip(text, bracket_depths(text), strict=True))
    commas = [place for place, (character, depth) in depths if character in ",、" and depth == 0]
    return [text[start + 1 : end] for start, end in pairwise([-1, *commas, len(text)])]


def bracket_depths(text: str) -> Iterator[int]:
    """Yield the number of open brackets after each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)
