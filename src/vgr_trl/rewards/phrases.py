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
TABLES = {
    table: {name: words.replace("\n", "") for name, words in lines.items()}
    for table, lines in tomllib.loads(_HERE.with_name("statements.toml").read_text("utf-8")).items()
}
_WORDS = {  # of texts that are ASCII, and of others, where an English word may stand right behind an ideograph
    name: [
        re.compile(text, re.ASCII | re.MULTILINE)
        for text in (words, f"{words}|{TABLES['ideographs'].get(name, words)}")
    ]
    for name, words in TABLES["words"].items()
}
POLARITY = {word: name for name in ("yes", "no") for word in TABLES["words"][name].split("|")}
_HALF_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {"\u3000": " ", "\xa0": " ", "İ": "I"}
_HALF_WIDTH |= dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")  # invisible spaces and joiners
_WIDE = re.compile(f"[{''.join(_HALF_WIDTH)}]")
MARKS, STOPS = " \t\r\n*`_\"'“”‘’「」«»《》", ".。,;:"
_END = re.compile(rf"(?:[{STOPS}\s]|(?<=[^\W\d_]{{2}})[!?])+\Z")  # "5!" keeps its sign
_WRAPPED = re.compile(
    r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|fbox)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|\\\((.*)\\\)|\\\[(.*)\\\]|\$\$?([^$]*)\$\$?|【(.*)】",
    re.DOTALL,
)


def to_half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, without zero-width characters."""
    return text if text.isascii() else _WIDE.sub(lambda sign: _HALF_WIDTH[sign[0]], text)


def search(kind: str, text: str) -> re.Match[str] | None:
    """Find the first words of a kind in a text of any case."""
    return _WORDS[kind][not text.isascii()].search(text.lower())


def match(kind: str, text: str) -> re.Match[str] | None:
    """Find words of a kind at the start of a text of any case."""
    return _WORDS[kind][not text.isascii()].match(text.lower())


def behind(kind: str, text: str) -> str:
    """Return the text behind the last words of a kind, the whole text if it has none."""
    ends = [words.end() for words in _WORDS[kind][not text.isascii()].finditer(text.lower())]
    return text[ends[-1] :] if ends else text


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
        if text[:1] in ("\\", "$", "【") and (match := _WRAPPED.fullmatch(text)):
            text = next(part for part in match.groups() if part is not None)
    return text


@lru_cache(4096)
def strip_article(text: str) -> str:
    """Return `text` normalised, without a leading article or a trailing 的."""
    text = normalise(strip_wrapping(text)).removesuffix("的")
    article = match("articles", text)
    return (text[article.end() :].strip() or text) if article else text


_PREFIXES = "k kilo 千|c centi 厘|m milli 毫|d deci 分|M mega 兆|G giga 吉|T tera 太|μ micro 微|n nano 纳".split("|")
_UNITS: dict[str, str] = {}
for _line in _HERE.with_name("units.txt").read_text("utf-8").splitlines()[1:]:
    for _words in (_unit.split(", ") for _unit in _line.removeprefix("+ ").split("; ")):
        for _prefix in ([""] * 3, *(map(str.split, _PREFIXES) if _line[0] == "+" else ())):
            for _word in _words:
                _kind = 2 if not _word.isascii() and _word != "Ω" else int(len(_word) > 2)
                _UNITS.setdefault(_prefix[_kind] + _word, _prefix[0] + _words[0])
                if _word.isascii() and len(_word) > 1:  # the plural
                    _UNITS.setdefault(f"{_prefix[_kind]}{_word}s", _prefix[0] + _words[0])
_UNIT = re.compile(
    r"(square\s+|sq\.?\s+|平方)?(cubic\s+|立方)?(.+?)(?:\s?\^\s?\{?([23])\}?|(?<=m)([23]))?", re.IGNORECASE
)
_SIMPLER: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"(?<=\d)(?:[\u202f\u2009]|\\,|\{,\})(?=\d{3}(?!\d))"), ""),  # thousands
    (re.compile(r"\*?\^?\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|[º˚]"), "°"),
    (re.compile(r"\\[,;:! ]|\\(?:quad|qquad)(?![A-Za-z])|(?<=\S)~|~(?=[A-Za-z])"), " "),
    (re.compile(r"\\(?:text|textrm|mathrm|mathbf|textbf|operatorname|rm)\s?\{([^{}]*)\}"), r"\1"),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}"),
]


def simplify_units(text: str) -> str:
    r"""Return `text` with degrees, spaces, texts and powers as plain characters, such as 5 cm for `5\,\text{cm}`."""
    for pattern, plain in () if text.isascii() and not re.search(r"[\\~*^{]", text) else _SIMPLER:
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
    names = []
    for part in re.split(r"\s?/\s?|\s+per\s+", text, maxsplit=1):
        square, cube, word, *power = unit.groups() if (unit := _UNIT.fullmatch(part)) else ("",) * 5
        name = _UNITS.get(word) or (_UNITS.get(word.casefold()) if len(word) > 3 else None)
        if part and not name:
            return None
        exponent = "2" if square else "3" if cube else power[0] or power[1]
        names.append(f"{name or ''}^{exponent}" if exponent else name or "")
    return "/".join(names)


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_HANZI = ["", *"一二三四五六七八九"]
_NUMBER_WORDS = {word: number for number, word in enumerate(_ONES)} | {"两": 2, "零": 0}
for _number in range(1, 100):
    _ten, _one = divmod(_number, 10)
    _NUMBER_WORDS[_HANZI[_ten] * (_ten > 1) + "十" * bool(_ten) + _HANZI[_one]] = _number
    if _ten > 1:
        _NUMBER_WORDS[_TENS[_ten - 2] + (f"-{_ONES[_one]}" if _one else "")] = _number
_WORD_PATTERN = "|".join(sorted(_NUMBER_WORDS, key=len, reverse=True))
_NUMBER_WORD = re.compile(rf"(?:{_WORD_PATTERN})(?![A-Za-z0-9一二三四五六七八九十百千万亿点分-])", re.IGNORECASE)
_QUANTITY = re.compile(
    r"(?:([+-])?([€£¥￥₹]|(?:US)?\\?\$|(?:USD|EUR|GBP|INR|CNY)(?= ?\d))\s?)?([+-])?"
    r"([1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE]([+-]?\d{1,2})|\s?(?:×|\\times|\\cdot|[*·x])\s?10\s?\^\s?(-?\d{1,2}|\{\s?[+-]?\d{1,2}\s?\}))?(\s*)(\S.*)?",
    re.DOTALL,
)
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s)?(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{?(\d+)\}?\s?\{?(\d+)\}?)")
_NO_NOUN = (  # words that change a number
    rf"(?:{_WORD_PATTERN}|is|was|has|does|less|unless|plus|minus|times|as|vs|its|thus|this|us|[a-z]*(?:[dnhrf]ths?|illions?)"
    r"|halves|quarters|dozens|hundreds|thousands|pairs|crores|lakhs|or|and|to|in|on|at|of|for|than|more|out|by|over|per|if)\b"
)
_COUNTED = re.compile(  # things, but no scale or second number
    rf"(?:(?!{_NO_NOUN})[a-z-]{{2,}} ){{0,2}}(?!{_NO_NOUN})(?:[a-z]{{2,}}s|people|men|women|children|sheep|fish)"
    r"|[个只条辆人名位张把件种次块棵头匹双本朵支根颗粒座栋层台架艘個](?P<noun>(?!以)[\u4e00-\u9fff]{0,6})",
    re.IGNORECASE,
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "千": 3, "万": 4, "百万": 6, "亿": 8}
_SCALE = re.compile(rf"({'|'.join(_SCALES)})(?![A-Za-z])\s?", re.IGNORECASE)


def may_be_value(text: str) -> bool:
    """Whether a text holds a digit, a number word or a sign of formulas."""
    words = text.lower().replace(".", " ").replace(",", " ").split()
    return bool(re.search(r"[\d\\√π=½¼一二三四五六七八九十两零]", text)) or any(word in _NUMBER_WORDS for word in words)


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
        scaled = [number.value * Fraction(10) ** places for number in (self, other)]
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
    if word := _NUMBER_WORD.match(text):
        text = str(_NUMBER_WORDS[word[0].casefold()]) + text[word.end() :]
    if not re.match(r"\s*[-+−–‐‑﹣€£¥￥₹$\\.\d¼-¾⅐-⅞UEGIC]", text):
        return None
    text = simplify_units(text)
    if not text.isascii():
        text = re.sub("[¼-¾⅐-⅞]", r" \g<0>", re.sub("[−–‐‑﹣]", "-", text))
        text = unicodedata.normalize("NFKC", text).replace("⁄", "/")
    text = text.strip().rstrip(" .,;:。")
    if match := _FRACTION.fullmatch(text):
        above, below = int(match[3] or match[5]), int(match[4] or match[6])
        value = int(match[2] or 0) + Fraction(above, below or 1)
        return Quantity(-value if match[1] == "-" else value, decimals=None) if below else None
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[1] and match[3]):
        return None
    before, currency, sign, number, power, exponent, gap, unit = (group or "" for group in match.groups())
    shift = int((power or exponent or "0").strip("{} "))
    if scale := _SCALE.match(unit):
        unit, shift = unit[scale.end() :], shift + _SCALES[scale[1].casefold()]
    number = number.replace(",", "")
    if len(number.partition(".")[2]) >= 15:  # 1.2000000000000002, computed in floats
        number = str(round(Decimal(number), 12))
    decimals = len(number.partition(".")[2]) - shift
    value = Fraction(f"{'-' if '-' in (before, sign) else ''}{number}e{shift}")
    if unit.casefold() in ("%", r"\%", "percent", "per cent") and not currency:
        return Quantity(value / 100, "%", decimals + 2)
    names = {read_unit(unit, attached=not gap and not scale)} if unit else set()
    if names == {None} and (gap or not unit.isascii()) and (counted := _COUNTED.fullmatch(unit)):  # 3 dogs
        names = {counted["noun"] if counted["noun"] is not None else unit.casefold().removesuffix("s")}
    if currency:
        names.add(read_unit(currency.replace("\\", "")))
    return None if None in names or len(names) > 1 else Quantity(value, "".join(map(str, names)), decimals)


_BOLD = re.compile(r"\*\*(.+?)\*\*(?!\s*:)|\\\((.+?)\\\)|\$([^$]+)\$|[“「\"](.+?)[”」\"]")
_NUMBER_START = re.compile(r"(?:(?<=[a-z] )|(?<=[\u4e00-\u9fff]{2})|(?<=[\u4e00-\u9fff]{2} ))[-+$€£¥]{0,2}\d")
_THINGS = re.compile(
    r"([\w$€£.,]+ (?!(?:in|at|of|to|per) )[a-z-]+) (?=(?!than\b|and\b)[a-z])", re.IGNORECASE
)  # 4 men who
_DATE_COMMA = re.compile(r"\b([A-Z][a-z]{2,8} \d{1,2}|of [A-Z][a-z]{2,8}), (?=\d{4}\b)")
_REMARK = re.compile(
    r"(?<=\w)(\*{0,2}) ?\((?!or\b|alternatively|maybe|或|也)"
    r"(?:[^()]*[a-z]{2}[^()]* [^()]*|(?<=[a-z] \()[\d.,]+ ?[a-z%]+)\)[\s.*]*$"
)
_COMPUTED = re.compile(
    r"\d[\d.,]*(?: (?:plus|minus|times|multiplied by|divided by|[-+*/×÷]) \d[\d.,]*)+", re.IGNORECASE
)
_REASON = re.compile(  # behind a space or a stop; a denial behind a stop
    rf"(?<=[^\s,;:(。])(?:[\s,;:(。]+(?:{_WORDS['reasons'][1].pattern})|\s*[,;:(。][\s,;:(。]*(?:{_WORDS['denies'][1].pattern}))",
    re.ASCII | re.MULTILINE,
)


def cut_fillers(text: str) -> str:
    """Return `text` without the words before its answer, such as `So there are about`."""
    for _ in range(5):
        text = text.lstrip(MARKS + ":,—≈~=#∴→⇒")
        filler = match("fillers", text)
        if filler is None or not strip_wrapping(text[filler.end() :]):
            break
        text = text[filler.end() :]
    return text


def cut_reason(text: str) -> str:
    """Return `text` without the reason behind its answer."""
    reason = _REASON.search(text.lower()) if " " in text or not text.isascii() else None
    return text[: reason.start()] if reason else text


_SAYS = re.compile(rf"(?a:\b(?:{'|'.join(filter(str.isascii, POLARITY))})\b)|[是对正有否不错没]", re.IGNORECASE)


def find_polarity(clause: str) -> set[str]:
    """Return `yes` and `no` if parts of a clause are nothing but that."""
    if not _SAYS.search(clause):
        return set()
    pieces = [piece for piece in re.split(r"[,.;:。!]|\s[-–—]\s", clause) if len(piece) <= 40]
    words = {strip_article(text) for piece in pieces for text in (piece, cut_fillers(piece))}
    return {POLARITY[word] for word in words if word in POLARITY}


@lru_cache(4096)
def why_no_value(clause: str) -> str:
    """Return why a clause states no single value, empty if it does."""
    if polarity := find_polarity(clause):
        return "two answers" if len(polarity) == 2 else ""
    said = behind("so", cut_reason(clause))
    is_none = search("denies", said) or search("refuses", said) or search("supposes", clause)
    return "a denial, refusal or condition" if is_none else ""


@lru_cache(4096)
def find_phrases(clause: str) -> tuple[str, ...]:
    """Return a clause and the phrases that say its answer, each within the one before: `It is a cat`, `a cat`, `cat`.

    They depend on the clause alone. One that denies, refuses or supposes says nothing but itself.
    """
    if read_quantity(strip_wrapping(clause)):
        return (clause,)
    clause = re.sub(r"(\d) ?\$(\\[^$]*|[a-z])\$", r"\1 \2", clause)  # 16 $\pi$
    shorter: list[str] = []
    if not why_no_value(clause):
        cut = _REMARK.sub(r"\1", behind("so", cut_reason(_DATE_COMMA.sub(r"\1 ", clause))))
        shorter = [*find_polarity(clause)] or [cut, *_shorten(cut)]
    return tuple(dict.fromkeys(filter(strip_article, (clause, *map(strip_wrapping, shorter)))))


def _shorten(clause: str) -> Iterator[str]:
    """Yield the phrase behind the last verb, else the end of the clause; then shorter phrases within it.

    The only emphasised words end the search. Bounds and comparisons (`more than 20`) stay whole.
    """
    phrase = opened = cut_fillers(clause)
    is_said = search("verbs", clause[: len(clause) - len(opened)])
    if not is_said and (said := behind("verbs", opened)) != opened:
        subject, phrase = opened.removesuffix(said), cut_fillers(said)
        if read_quantity(opened.split(" ")[0]) and not _COMPUTED.match(subject):  # 50% of them are red
            phrase = "" if re.search(r"\d", phrase) else subject
    phrase = re.split(r"(?<![\d\s]): ", phrase)[-1]
    if search("joins", phrase):
        return
    phrase = _first_part(phrase)
    marked = {next(filter(None, match.groups())) for match in _BOLD.finditer(clause)}
    if len(marked) == 1 and "=" not in clause[clause.rfind(min(marked)) + len(min(marked)) :]:
        yield from ([phrase] if min(marked) in phrase else []) + [*marked]
        return
    is_bound = search("bounds", phrase)
    starts = [] if phrase != opened or is_bound else list(_NUMBER_START.finditer(phrase))
    if starts and len(re.findall(r"\d[\d.,:/]*|[=<>\\^]", phrase)) == 1:
        before = phrase[: starts[-1].start()]
        is_joined = any(map(read_quantity, before.split())) or re.search(r"(?:\b(?:and|or|also|to)|和|或)\s*$", before)
        phrase = phrase if is_joined else phrase[starts[-1].start() :]
    yield phrase
    if (counted := _THINGS.match(phrase)) and read_quantity(counted[1]):
        yield counted[1]
        return
    while not is_bound and (lead := match("leads", phrase)) and strip_wrapping(phrase[lead.end() :]):
        phrase = phrase[lead.end() :]
        yield phrase
    while place := search("places", phrase):
        phrase = phrase[: place.start()]
        yield phrase


def _first_part(phrase: str) -> str:
    """Return a phrase up to its first comma, unless its parts are a list."""
    pieces = split_list(phrase.rstrip(MARKS + STOPS))
    is_list = all(len(piece.split()) <= 4 and not search("verbs", piece) for piece in pieces)
    return phrase if is_list else pieces[0]


def split_list(text: str) -> list[str]:
    """Split at the commas outside brackets; a list is compared in its order."""
    if "," not in text and "、" not in text:
        return [text]
    depths = enumerate(zip(text, bracket_depths(text), strict=True))
    commas = [place for place, (character, depth) in depths if character in ",、" and depth == 0]
    return [text[start + 1 : end] for start, end in pairwise([-1, *commas, len(text)])]


def bracket_depths(text: str) -> Iterator[int]:
    """Yield the number of open brackets after each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)
