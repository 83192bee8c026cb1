"""Words of clauses, numbers with units, and the phrases of a clause that may be its answer."""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

_HALF_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {"\u3000": " ", "\xa0": " ", "İ": "I"}
_HALF_WIDTH |= dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")  # invisible spaces and joiners
_WIDE = re.compile(f"[{''.join(_HALF_WIDTH)}]")
MARKS, STOPS = " \t\r\n*`_\"'“”‘’「」«»《》", ".。,;:"
_WRAPPED = re.compile(
    r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|fbox)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|\\\((.*)\\\)|\\\[(.*)\\\]|\$\$?([^$]*)\$\$?|【(.*)】",
    re.DOTALL,
)
_ARTICLE = re.compile(r"(?:an?|the)\b\s*(?=.)|一[个只条辆种张把位名](?=.)")

_POLAR_WORDS = {
    "yes": "yes true yeah yep correct 是 是的 对 正确 有",
    "no": "no false nope incorrect 否 不是 不对 错 错误 不 没有 不正确",
}
POLARITY = {word: kind for kind, words in _POLAR_WORDS.items() for word in words.split()}
_POLAR_ENDS = ("的", *{word[-1] for word in POLARITY})
_KINDS = {  # English words, and parts of Chinese and other words
    "denies": """not no nobody nothing cannot never neither nor none without except anything unlikely wrong incorrect
false eliminate eliminates excluded ruled nicht kein n't n’t ❌ ✗ 不 除了 非 排除 错 没 别 勿 未 ません 아니""",
    "supposes": "if unless whether suppose assume assuming doubt wonder case 如果 假如 假设 若 是否 怀疑",
    "others": """another other previous initially earlier common says claims thinks thought people often least worst
可能 其他 干扰""",
    "refuses": """else deny refuse unknown sorry unclear unable impossible mistake certain please used user depends
insufficient moins mindestens 无法 难以 不清楚 请 也可能 要么 还是 吗 抱歉 至少 至多 最多有 最少有 超过""",
    "bounds": """than least most up over under above below between fewer nearly almost before after until twice half
third quarter double times minus plus sum difference product square similar same negative opposite close closer as
different minimum maximum unlike behind next < > 大于 小于 多于 少于 不足 不到 比 一半 倍 之间 负 以上 以下""",
    "joins": "or vs either alternatively alias 或 还是 要么",
    "verbs": """is are was were be see find show shows says reads equals totals costs weighs has have had contains
displays includes becomes gives means lasts departs confirms suggest 是 为 有 等于 共 占 了 着 位于 需要""",
}


def _compile_words(words: list[str]) -> re.Pattern[str]:
    english = [word for word in words if word.encode().isalpha()]
    parts = [word for word in words if not word.encode().isalpha()]
    return re.compile(rf"(?<![a-z])(?:{'|'.join(english)})(?![a-z])|{'|'.join(parts)}")


_PATTERNS = {kind: _compile_words(words.split()) for kind, words in _KINDS.items()}
_SO = re.compile(  # before the conclusion of a clause
    r"(?i)(?:→|⇒|\\(?:rightarrow|implies))\s*(?=\S+ = )|[,;.]\s+(?:and |but )?(?:so|therefore|thus|hence|giving)\b,?"
    r"|[,;。]\s*(?:因此|所以|故|则|(?:一共|总共|共)(?=有?\d))|不是[^,。;]{1,12},?而是|\bnot [^,.;]{1,40},? but\b"
)
_REASON = re.compile(  # behind it
    r"(?i)(?<=[^\s,;:(。])(?:[\s,;:(。]+(?:(?:because|since|which|where|due to|based on|given (?:that|the)|and not"
    r"|but not|rather than|instead of|unlike|(?<!well )as(?! well)(?= \S+ ))\b|因为|由于|而不是|而非|不是|其中)"
    r"|\s*[,;:(。]\s*(?:(?:not|no|without|except|wrong|there['’s is]+ no)\b|不|没|非))"
)
_FILLER = re.compile(  # before an answer, and no part of it
    r"(?i)(?:so|thus|therefore|hence|then|well|okay|sure|result|i (?:think|believe|guess)(?: that)?|in (?:short|total)"
    r"|(?:it|this|that) (?:looks|seems|appears)(?: like| to be)?|(?:it|that|this|there|they|these|statement)(?:['’]s|"
    r" (?:is|are|was|were))|assistant|option|choice|answer|letter|number|the(?= statement)|(?:clear|actual)ly"
    r"|(?:most )?likely|probably|exactly|only|about|approximately|around|a total of)\b"
    r"|(?:in \d{4}|(?:according to|based on|as \w+ in) "
    r"[^,.;]{1,40}),(?= \S)|因此|所以|综上所?述?|故|选项|選項|大约|约|[一总]?共有?|应该是|应为|图片?中共?有|这是|是|有"
)


def to_half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, without zero-width characters."""
    for sign in () if text.isascii() else {*_WIDE.findall(text)}:
        text = text.replace(sign, _HALF_WIDTH[sign])
    return text


def has(kind: str, text: str) -> bool:
    """Whether a text has words of a kind."""
    return _PATTERNS[kind].search(text.lower()) is not None


def refuses(text: str) -> bool:
    """Whether a text gives no answer, asks, or points elsewhere."""
    return has("refuses", text) or text.rstrip(MARKS + ")$").endswith("?") or text.startswith("See ")


def behind_verb(text: str) -> str:
    """Return the text behind the last verb, the whole text if it has none."""
    return text[max((verb.end() for verb in _PATTERNS["verbs"].finditer(text.lower())), default=0) :]


def fold(text: str) -> str:
    """Return `text` with normalised case, width, white space and accents, and without zero-width spaces."""
    return " ".join(to_half_width(unicodedata.normalize("NFC", text)).casefold().split())


@lru_cache(4096)  # parts of a completion are compared with each option
def normalise(text: str) -> str:
    """Return `text` folded (`fold`) and without final punctuation, unless it is nothing else."""
    folded = fold(text)
    stops = STOPS + (" !?" if folded.rstrip(STOPS + " !?")[-2:].isalpha() else " ")  # "5!" keeps its sign
    return folded.rstrip(stops) or folded


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
    article = _ARTICLE.match(text)
    return text[article.end() :] if article else text


# Units behind a number: the name, then other spellings. A word that is not listed is a unit of its own.
_UNIT_NAMES = """m, metre, meter, 米; km, kilometre, kilometer, 千米, 公里; cm, centimetre, centimeter, 厘米;
g, gram, 克; mm, millimetre, millimeter, 毫米; kg, kilogram, 千克, 公斤; mg, 毫克; L, l, litre, liter, 升;
mL, ml, milliliter, 毫升; s, sec, second, 秒; min, minute, 分钟; h, hr, hour, 小时; day, 天; week, 周; month, 个月;
year, yr, years old, 年, 岁; in, inch, inches, 英寸; ft, foot, feet, 英尺; yd, yard; mi, mile, 英里; 海里;
lb, pound, 磅; oz, ounce; t, ton, 吨; °, deg, degree, 度; °C, degrees Celsius, Celsius, 摄氏度;
°F, degrees Fahrenheit, Fahrenheit, 华氏度; mph; 月; 日; 分; $, \\$, US$, USD, dollar, 美元; cent; €, EUR, euro, 欧元;
£, GBP; ¥, ￥; yen, JPY, 日元; 元, 块, CNY, RMB, yuan; ₹, INR, rupee; N, newton, 牛; J, joule, 焦; kJ; W, watt, 瓦;
kW; mW; MW; V, volt, 伏; mV; A, amp, ampere, 安; mA; Ω, ohm, 欧; kΩ; Hz, hertz; MHz; Pa, pascal, 帕; kPa;
rad, radian; mol, mole; dB; rpm; ppm; px, pixel; %, \\%, percent, per cent"""
_UNITS = {word: entry.split(", ")[0] for entry in re.split(r";\s", _UNIT_NAMES) for word in entry.split(", ")}
_UNIT = re.compile(r"(square |sq\.? |平方)?(cubic |立方)?(.+?)(?:\s?\^\s?\{?([23])\}?|(?<=m)([23]))?", re.IGNORECASE)
_SIMPLER: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"(?<=\d)(?:[\u202f\u2009]|\\,|\{,\})(?=\d{3}(?!\d))"), ""),  # thousands
    (re.compile(r"\*?\^?\s?\{?\s?\\(?:circ|degree)(?![A-Za-z])\s?\}?|[º˚]"), "°"),
    (re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|(?<=\S)~|~(?=[A-Za-z])"), " "),
    (re.compile(r"\\(?:text|textrm|mathrm|mathbf|textbf|operatorname|rm)\s?\{([^{}]*)\}"), r"\1"),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}"),
]
_ENGLISH = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
_NUMBER_WORDS = {word: number for words in (_ENGLISH, "零一二三四五六七八九十") for number, word in enumerate(words)}
_NUMBER_WORDS["两"] = 2
_WORD_PATTERN = "|".join(sorted(_NUMBER_WORDS, key=len, reverse=True))
_NUMBER_WORD = re.compile(rf"(?:{_WORD_PATTERN})(?![A-Za-z0-9一二三四五六七八九十百千万亿点分-])", re.IGNORECASE)
_FRACTION = re.compile(r"([+-]?)\s*(?:(\d+)\s)?(?:(\d+)\s?/\s?(\d+)|\\[dt]?frac\s?\{?(\d+)\}?\s?\{?(\d+)\}?)")
_QUANTITY = re.compile(
    r"(?:(?:([+-])\s*)?([€£¥￥₹]|(?:US)?\\?\$|(?:USD|EUR|GBP|INR|CNY)(?= ?\d))\s?)?(?:([+-])\s*)?"
    r"([1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE]([+-]?\d{1,2})|\s?(?:×|\\times|\\cdot|[*·x])\s?10\s?\^\s?(-?\d{1,2}|\{\s?[+-]?\d{1,2}\s?\}))?(\s*)(\S.*)?",
    re.DOTALL,
)
_THINGS = re.compile(  # one or two things that a number counts, no words that change it
    rf"(?i)(?:(?!(?:{_WORD_PATTERN}|was|has|less|plus|minus|times|its|[a-z]*(?:[dnhrf]ths?|illions?)|halves|quarters?|half"
    r"|dozens?|hundreds?|thousands?|crores?|lakhs?|and|for|than|more|out|over|per|negative|the|are|from|with|that|who"
    r"|which|left|wrong|next|then|maybe|also)\b)(?=[a-z-]*[aeiouy])[a-z-]{3,}(?: |$)){1,2}"
    r"|[个只条辆人名位张把件种次块棵头匹双本朵支根颗座层](?P<noun>(?!以)[\u4e00-\u9fff]{0,6})"
)


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
    names, text = [], " ".join(unicodedata.normalize("NFKC", text).split())
    if attached and re.fullmatch(r"[A-Za-ln-z](?:\^\{?\d\}?)?", text):
        return None
    for part in re.split(r"\s?/\s?|\s+per\s+", text, maxsplit=1):
        square, cube, word, *powers = unit.groups() if (unit := _UNIT.fullmatch(part)) else ("",) * 5
        if not (name := _UNITS.get(word) or _UNITS.get(word.casefold().removesuffix("s") if len(word) > 2 else "")):
            return None
        power = "2" if square else "3" if cube else powers[0] or powers[1]
        names.append(f"{name}^{power}" if power else name)
    return "/".join(names)


def may_be_value(text: str) -> bool:
    """Whether a text holds a digit, a number word or a sign of formulas."""
    words = re.findall("[a-z]+", text.lower())
    return bool(re.search(r"[\d\\√π=½¼一二三四五六七八九十两零]", text)) or not _NUMBER_WORDS.keys().isdisjoint(words)


class Quantity(NamedTuple):
    """A number and its unit, "" for none."""

    value: Fraction
    unit: str = ""

    def equals(self, other: "Quantity") -> bool:
        """Return whether both are the same number; a unit that only one of them has is ignored."""
        if {self.unit, other.unit} == {"", "%"}:  # 50% is 0.5, and 50 of a hundred
            share, plain = (self, other) if self.unit else (other, self)
            return share.value in (plain.value, plain.value * 100)
        return self.value == other.value and (self.unit == other.unit or "" in (self.unit, other.unit))


@lru_cache(4096)
def read_quantity(text: str) -> Quantity | None:
    """Parse `text` as a number with an optional unit; None if it is anything else.

    Args:
        text: decimal, number with thousands commas, scientific notation, fraction or percentage, number
            word to twenty, with a currency sign, a listed unit or counted things.
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
        return Quantity(-value if match[1] == "-" else value) if below else None
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[1] and match[3]):
        return None
    before, currency, sign, number, power, exponent, gap, unit = (group or "" for group in match.groups())
    value = Fraction(f"{before or sign}{number.replace(',', '')}e{(power or exponent or '0').strip('{} ')}")
    name = read_unit(unit or currency, attached=not gap) if unit or currency else ""
    if name is None and (gap or not unit.isascii()) and (things := _THINGS.fullmatch(unit)):  # 3 dogs
        name = unit.casefold().removesuffix("s") if things["noun"] is None else things["noun"]
    return None if name is None or (unit and currency) else Quantity(value, name)


_BOLD = re.compile(r"\*\*(.+?)\*\*(?!\s*:)|\\\((.+?)\\\)|\$([^$]+)\$|[“「\"](.+?)[”」\"]")
_NUMBER = re.compile(
    rf"(?i)(?:\A[-+]\s)?[-+$€£¥]{{0,2}}(?<![\w.(\[])\d(?:[\d.,:/]*\d)?|(?<![a-z-])(?:{_WORD_PATTERN})(?![a-z-])"
)
_NUMBER_END = re.compile(r"\((?!\d)|(?i:[ap]\.?m\b)|(?:in|on|at|for|from|with|by|who|that|when|according|left)\b")
_REMARK = re.compile(  # behind an answer, in brackets
    r"(?<=\w)(\*{0,2}) ?\((?!or\b|alternatively|maybe|或|也)(?:[^()]*[a-z]{2}[^()]* [^()]*|[\d.,]+ ?[a-z%]+)\)[\s.*]*$"
)
_LEAD = re.compile(  # before the thing that a phrase names
    r"(?i)(?!(?:build|ceil|k|r|str|w)ing\s)[a-z]+ing\s+|[a-z]{3,}ed (?=by|in|on|at)|(?:an?|the|his|her|its|born|made"
    r"|by|in|on|at|to|as|with|for|from|called|named|number|value of|length of|year)\s+|着|了|正?在"
)
_PLACE = re.compile(  # behind it
    r"(?i)\s(?:in|on|at|of|from|for|per|by|behind|near|under|that|who|shown|visible|(?!build|ceil)[a-z]{3,}ing)\s.*"
)


def cut_fillers(text: str) -> str:
    """Return `text` without the words before its answer, such as `So there are about`."""
    for _ in range(5):
        text = text.lstrip(MARKS + ":,—≈~=#∴→⇒")
        filler = _FILLER.match(text)
        if filler is None or not strip_wrapping(text[filler.end() :]):
            break
        text = text[filler.end() :]
    return text


def cut_reason(text: str) -> str:
    """Return the conclusion of a clause, without the reason before and behind it."""
    reason = _REASON.search(text)
    text = text[: reason.start()] if reason else text
    return text[max((so.end() for so in _SO.finditer(text)), default=0) :]


def find_polarity(clause: str) -> set[str]:
    """Return `yes` and `no` if parts of a clause are nothing but that."""
    pieces = [piece for piece in re.split(r"[,.;:。!]|\s[-–—]\s", clause.lower()) if len(piece) <= 40]
    pieces = [piece for piece in pieces if piece.rstrip(MARKS + ")}]】$").endswith(_POLAR_ENDS)]
    words = {strip_article(text) for piece in pieces for text in (piece, cut_fillers(piece))}
    return {POLARITY[word] for word in words if word in POLARITY}


@lru_cache(4096)
def why_no_value(clause: str) -> str:
    """Return why a clause states no single value, empty if it does."""
    if polarity := find_polarity(clause):
        return "two answers" if len(polarity) == 2 else ""
    said = cut_reason(clause)
    is_none = has("denies", said) or refuses(said) or has("supposes", clause)
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
        cut = _REMARK.sub(r"\1", cut_reason(clause))
        shorter = [*find_polarity(clause)] or [cut, *_shorten(cut)]
    return tuple(dict.fromkeys(filter(strip_article, (clause, *map(strip_wrapping, shorter)))))


def _shorten(clause: str) -> Iterator[str]:
    """Yield the phrase behind the last verb, then shorter phrases within it; bounds and comparisons stay whole."""
    opened = cut_fillers(clause)
    said = behind_verb(opened)
    phrase = cut_fillers(said)
    if said != opened and read_quantity(opened.split(" ")[0]) and not re.search(r"\d", said):  # 50% of them are red
        phrase = opened.removesuffix(said)
    phrase = re.split(r"(?<![\d\s]): ", phrase)[-1]
    if has("joins", phrase) or "\n" in phrase or re.search(r"\b(?:is|are) \S+,? and the\b", clause):  # two values
        return
    marked = {next(filter(None, match.groups())) for match in _BOLD.finditer(clause)}
    if len(marked) == 1 and "=" not in clause[clause.rfind(min(marked)) + len(min(marked)) :]:
        yield from ([phrase] if min(marked) in phrase else []) + [*marked]
        return
    yield phrase
    numbers = list(_NUMBER.finditer(phrase))
    if has("bounds", phrase) or re.search(r"[=<>≤≥\\^√π+*]", phrase):
        return
    if len(numbers) == 1 and not re.search(r"\b(?:and|also|to)\b|和|[,;|/]|(?:\S+ ){4}", phrase[: numbers[0].start()]):
        words = phrase[numbers[0].start() :].split()
        counted = [" ".join(words[:count]) for count in (3, 2) if read_quantity(" ".join(words[:count]))]
        if counted or len(words) == 1 or _NUMBER_END.match(words[1]):
            yield (counted or words)[0]
    if len(numbers) == 1:
        return
    while (lead := _LEAD.match(phrase)) and strip_wrapping(phrase[lead.end() :]):
        phrase = phrase[lead.end() :]
        yield phrase
    yield phrase if numbers else _PLACE.sub("", phrase)


def split_list(text: str) -> list[str]:
    """Split at the commas outside brackets; a list is compared in its order."""
    return re.split(r"[,、](?![^(\[{]*[)\]}])", text)


def bracket_depths(text: str) -> Iterator[int]:
    """Yield the number of open brackets after each character."""
    return accumulate((character in "([{") - (character in ")]}") for character in text)
