"""Words of each language, from `statements.toml`, numbers with units, and phrases, in text without differences that do
not count.
"""

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

TABLES = tomllib.loads(Path(__file__).with_name("statements.toml").read_text(encoding="utf-8"))
POLARITY = {word: name for table in TABLES.values() for name in ("yes", "no") for word in table.get(name, ())}


def compile_words(name: str, *languages: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    """Compile the entries of languages (all by default) under `name` into one pattern."""
    patterns = []
    for language in languages or TABLES:
        entry = TABLES[language].get(name, [])
        flag = "a" * (language == "en")  # an English word may stand right behind an ideograph
        patterns += [f"(?{flag}:{part})" for part in ([entry] if isinstance(entry, str) else entry)]
    return re.compile("|".join(patterns) or "(?!)", flags | re.MULTILINE)


WORDS = {
    name: compile_words(name)
    for name in (
        "states confirms unless openers option reasons joins denies refuses withdraws bounds refers verbs leads starts "
        "places doing so points pronouns articles courtesies computes"
    ).split()
}
OR = re.compile(r"\b(?:or|vs|either|alternatively|alias)\b|或|还是|也可能|要么|または", re.IGNORECASE)
_HALF_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {"\u3000": " ", "\xa0": " "}
_HALF_WIDTH |= dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")  # invisible spaces and joiners
_FULL_WIDTH = re.compile(f"[{''.join(_HALF_WIDTH)}]")
_EXCLAMATION_AFTER_WORD = re.compile(r"(?<=[^\W\d_]{2})[!?]+$")
MARKS, STOPS = " \t\r\n*`_\"'“”‘’「」«»《》", ".。,;:"
_WRAPPED = re.compile(
    r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|fbox)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|\\\((.*)\\\)|\\\[(.*)\\\]|\$\$?([^$]*)\$\$?|【(.*)】",
    re.DOTALL,
)


def to_half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, without zero-width characters."""
    return text if text.isascii() else _FULL_WIDTH.sub(lambda each: _HALF_WIDTH[each[0]], text)


def fold(text: str) -> str:
    """Return `text` with normalised case, width, white space and accents, and without zero-width spaces."""
    return " ".join(to_half_width(unicodedata.normalize("NFC", text)).casefold().split())


@lru_cache(4096)  # parts of a completion are compared with each option
def normalise(text: str) -> str:
    """Return `text` folded (`fold`) and without final punctuation.

    Exclamation and question marks are removed only after a word, so that 5! stays. Punctuation alone stays.
    """
    collapsed = fold(text)
    stripped = collapsed.rstrip(STOPS).rstrip()
    while stripped.endswith(("!", "?")) and (match := _EXCLAMATION_AFTER_WORD.search(stripped)):
        stripped = stripped[: match.start()].rstrip(STOPS).rstrip()
    return stripped or collapsed


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


@lru_cache(4096)  # the options of a question are compared again for each part of each completion
def strip_article(text: str) -> str:
    """Return `text` normalised, without a leading article or a trailing 的 or です."""
    text = normalise(strip_wrapping(text)).removesuffix("的").removesuffix("です")
    match = WORDS["articles"].match(text)
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

_UNIT_TERM = re.compile(
    r"(?:(?P<square>(?:square|sq\.?)\s+|平方)|(?P<cube>cubic\s+|立方))?(?P<base>.+?)"
    r"(?:\s?\^\s?\{?(?P<power>[23])\}?|(?<=m)(?P<plain>[23]))?",
    re.IGNORECASE,
)
_INVERSE = re.compile(r"(?:^|\s|(?<=[a-z])\\cdot\s?)([A-Za-z]+)\s?\^\s?\{?-(?:1|([23]))\}?$")  # m s^{-2}
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
    if attached and re.fullmatch(r"[A-Za-ln-z](?:\^\{?\d\}?)?", text):
        return None
    text = _INVERSE.sub(lambda match: f"/{match[1]}" + f"^{match[2]}" * bool(match[2]), text)
    parts = [part and _read_unit_term(part) for part in _PER.split(text, maxsplit=1)]
    return None if None in parts else "/".join(map(str, parts))


def _read_unit_term(text: str) -> str | None:
    match = _UNIT_TERM.fullmatch(text)
    if match is None:
        return None
    powers = ["2"] * bool(match["square"]) + ["3"] * bool(match["cube"]) + [match["power"] or match["plain"] or ""]
    unit = _UNIT_NAMES.get(match["base"])
    unit = unit or (_FOLDED_UNIT_NAMES.get(match["base"].casefold()) if len(match["base"]) > 1 else None)
    return unit and "^".join([unit, *filter(None, powers)])


_NUMBER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_POWER_OF_TEN = r"[eE](?P<exponent>[+-]?\d{1,2})|\s?(?:×|\\times|\\cdot|[*·x])\s?10\s?\^\s?"
_POWER_OF_TEN += r"(?P<power>-?\d{1,2}|\{\s?[+-]?\d{1,2}\s?\})"
_QUANTITY = re.compile(
    r"(?:(?P<before>[+-])?(?P<currency>[€£¥￥₹]|(?:US)?\\?\$|(?:USD|EUR|GBP|INR|CNY)(?= ?\d))\s?)?"
    rf"(?P<sign>[+-])?(?P<number>{_NUMBER})(?:{_POWER_OF_TEN})?(?P<gap>\s*)(?P<unit>\S.*)?",
    re.DOTALL,
)
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s)?(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{(\d+)\}\s?\{(\d+)\})")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_NUMBERS = [pair for table in TABLES.values() for pair in enumerate(table.get("numbers", ()))]
_NUMBER_WORDS = {word: number for number, words in _NUMBERS for word in words.split("|")}
for _table in TABLES.values():
    for _tens, _ten in enumerate(_table.get("tens", ()), 2):  # forty, forty-two, 四十二
        _units = {"": 0} | {word.split("|")[0]: unit for unit, word in enumerate(_table["numbers"][1:10], 1)}
        _joint = "-" if _ten.isascii() else ""
        _NUMBER_WORDS |= {_ten + _joint * bool(word) + word: 10 * _tens + unit for word, unit in _units.items()}
_NUMBER_WORD_PATTERN = re.compile(
    rf"^(?:{'|'.join(sorted(_NUMBER_WORDS, key=len, reverse=True))})(?![A-Za-z0-9一二三四五六七八九十百千万点分])",
    re.IGNORECASE,
)
_ENGLISH_NUMBERS = "|".join(filter(str.isascii, _NUMBER_WORDS))
_COUNTED_NOUN = re.compile(  # nouns after a number, but no scale word and no second number
    rf"(?!(?:{_ENGLISH_NUMBERS}|in|on|at|of|for|vs|per|less|tops|oder|ou|und|et|unless|would|does|do|can|could|may|is|are|was|were|has|have|it|so|as|if|or|and|to|plus|minus|times|by|out|over"
    r"|hundred|thousand|[mbtr]+illion|dozen|half|halves|squared|cubed|percent|alias|more than)s?\b)"
    r"[a-z]{2,}(?: [a-z]{2,}){0,2}"
    r"|[个只条辆人名位张把件种次块棵头匹双本朵支根颗粒座栋层台架艘個枚羽冊]の?(?P<noun>(?!以)[\u4e00-\u9fff]{0,6})",
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


_EMPHASISED = re.compile(
    r"\*\*(.+?)\*\*(?!\s*:)|\\\((.+?)\\\)|\$([^$]+)\$|[“「\"](.+?)[”」\"]|(?<![\w*])\*([^\s*][^*]*)\*(?![\w*])"
)
_NUMBER_START = re.compile(r"(?:(?<=[a-z] )|(?<=[\u4e00-\u9fff]{2})|(?<=[\u4e00-\u9fff]{2} ))[-+$€£¥]{0,2}\d")
# 4 queries with a value above 3
_COUNTED = re.compile(r"([\w$€£.,]+ (?!(?:in|at|of|to|per) )[a-z-]+) (?=(?!than\b)[a-z])", re.IGNORECASE)
_DATE_COMMA = re.compile(r"\b([A-Z][a-z]{2,8} \d{1,2}|of [A-Z][a-z]{2,8}), (?=\d{4}\b)")
_REMARK = re.compile(
    r"(?<=\w)(\*{0,2}) ?\((?!or\b|alternatively|maybe|或|也)"
    r"(?:[^()]*[a-z]{2}[^()]* [^()]*|[^()=]+=[^()=]+|(?<=[a-z] \()[\d.]+ ?%)\)[\s.*]*$"
)
_COMPUTED = re.compile(rf"\d[\d.,]*(?: (?:{WORDS['computes'].pattern}) \d[\d.,]*)+", re.IGNORECASE)  # 10 divided by 2
_FACTOR = re.compile(r"(\d) ?\$(\\[^$]*|[a-z])\$")  # 16 $\pi$
_JOIN_BEHIND = re.compile(rf"(?:{WORDS['joins'].pattern})\s*$", re.IGNORECASE)
_REASON = re.compile(  # behind a space or a stop; a denial behind a stop
    rf"(?<=[^\s,;:(。])(?:[\s,;:(。]+(?:{WORDS['reasons'].pattern})|\s*[,;:(。][\s,;:(。]*(?:{WORDS['denies'].pattern}))",
    re.IGNORECASE | re.MULTILINE,
)
_LOCATED = re.compile(r"\s*[a-z]{3,}(?:ed|ing) (?:in|at|on|by|near|as|for|with)\b")  # located in Paris
_SHARE = re.compile(r"([\d.,]+ ?\\?%) of \D+")
_RESTATED = re.compile(r"(\w+) \((\w+)\)")
_QUOTED = re.compile(r"[“「\"].+?[”」\"]")
BULLETS = re.compile(r"^(?:-[\s*_`\"']+)+")  # not the sign of -5


def cut_openers(text: str) -> str:
    """Return `text` without the words before its answer, such as `So there are about`."""
    for _ in range(5):
        text = text.lstrip(MARKS + ":,—≈~=#∴→⇒")
        match = WORDS["openers"].match(text)
        if match is None or not strip_wrapping(text[match.end() :]):
            break
        text = text[match.end() :]
    return text


def cut_reason(text: str) -> str:
    """Return `text` without the reason behind its answer."""
    found = _REASON.search(text)
    return text[: found.start()] if found else text


_MAX_POLARITY_LENGTH = 40  # of yes or no with the words before it


def find_polarity(clause: str) -> set[str]:
    """Return `yes` and `no` if parts of a clause are nothing but that."""
    pieces = [each for each in re.split(r"[,.;:。!]|\s[-–—]\s", clause) if len(each) <= _MAX_POLARITY_LENGTH]
    found = {POLARITY.get(strip_article(text)) for each in pieces for text in (each, cut_openers(each))}
    return {word for word in found if word}


def why_no_value(clause: str) -> str:
    """Return why a clause states no single value, empty if it does."""
    if polarity := find_polarity(clause):
        return "two answers" if len(polarity) == 2 else ""
    clause = WORDS["so"].split(cut_reason(clause))[-1]
    is_denied = WORDS["denies"].search(_QUOTED.sub("", clause)) or WORDS["refuses"].search(clause)
    return "a denial or refusal" if is_denied else ""


@lru_cache(4096)
def find_phrases(clause: str) -> tuple[str, ...]:
    """Return a clause and the phrases that say its answer, each within the one before: `It is a cat`, `a cat`, `cat`.

    They depend on the clause alone. One that denies or refuses says nothing but itself.
    """
    clause = _RESTATED.sub(_drop_restated, _FACTOR.sub(r"\1 \2", clause))
    cut = _REMARK.sub(r"\1", WORDS["so"].split(cut_reason(_DATE_COMMA.sub(r"\1 ", clause)))[-1])
    if WORDS["reasons"].match(cut.lstrip(MARKS)):
        cut = cut.partition(", ")[2] or cut
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
    opened = cut_openers(clause)
    if share := _SHARE.fullmatch(opened):
        yield share[1]
        return
    phrase, is_said = opened, bool(WORDS["verbs"].search(clause[: len(clause) - len(opened)]))
    if not is_said and (verbs := list(WORDS["verbs"].finditer(opened))):
        phrase, is_said = cut_openers(opened[verbs[-1].end() :]), True
        subject = opened[: verbs[-1].start()]
        if read_quantity(opened.split(" ")[0]) and not re.search(r"\d", phrase):  # 50% of them are red
            phrase = subject
        elif read_quantity(opened.split(" ")[0]) and not _COMPUTED.fullmatch(subject.strip()):
            phrase = ""
    head, *further = re.split(r"(?<![\d\s]): ", phrase)
    if further and (amount := read_quantity(cut_openers(head))) and amount.unit:  # 5 people: 3 men and 2 women
        phrase = head
    elif further:
        phrase, is_said = further[-1], True
    if OR.search(phrase):
        return
    phrase = _first_part(phrase)
    matches = list(_EMPHASISED.finditer(clause))
    if matches and "=" in clause[matches[-1].end() :]:  # a side of an equation
        matches = []
    bold, found = {match[1] for match in matches} - {None}, {next(filter(None, match.groups())) for match in matches}
    if len(bold) == 1 or (len(found) == 1 and (min(found) in phrase or not is_said)):
        match = next(match for match in matches if match[1] or len(bold) != 1)
        yield from [phrase] * (match[0].rstrip(MARKS + STOPS) in phrase) + [next(filter(None, match.groups()))]
        return
    if not (is_said or WORDS["bounds"].search(phrase)):
        starts = list(_NUMBER_START.finditer(phrase))
        if len(re.findall(r"\d[\d.,:/]*|[=<>\\^]", phrase)) != 1:
            starts = list(WORDS["starts"].finditer(phrase))
        before = phrase[: starts[-1].start()] if starts else ""
        if any(read and not read.unit for read in map(read_quantity, before.split())) or _JOIN_BEHIND.search(before):
            starts = []
        phrase = phrase[starts[-1].start() :] if starts else phrase
    yield phrase
    counted = _COUNTED.match(phrase)
    if counted and read_quantity(counted[1]) and not WORDS["joins"].match(phrase, counted.end()):
        yield counted[1]
        return
    if re.match("[a-z]+ing ", phrase) and (place := WORDS["places"].search(phrase)):
        yield phrase[: place.start()]
    lead = None if WORDS["bounds"].search(phrase) else WORDS["leads"].match(phrase)
    while lead and strip_wrapping(phrase[lead.end() :]):
        phrase = phrase[lead.end() :]
        yield phrase
        lead = WORDS["leads"].match(phrase)
    for each in ("places", "doing"):
        if place := WORDS[each].search(phrase):
            phrase = phrase[: place.start()]
            yield phrase


def _first_part(phrase: str) -> str:
    """Return a phrase up to its first comma, unless its parts are a list."""
    pieces = split_list(phrase.rstrip(MARKS + STOPS))
    if len(pieces) > 1 and _LOCATED.match(pieces[1]):
        return pieces[0]
    is_list = all(len(piece.split()) <= 4 and not WORDS["verbs"].search(piece) for piece in pieces)
    articles = [WORDS["articles"].match(piece.strip()) is not None for piece in pieces]
    if is_list and (len(pieces) > 2 or articles != [False, True]):
        return phrase
    return pieces[0]


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
