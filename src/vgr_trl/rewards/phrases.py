"""Find what a clause says, without the reference: `It is a red dog.` says a red dog."""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise

from vgr_trl.rewards.language import MARKS, OR, POLARITY, STOPS, WORDS, strip_article, strip_wrapping
from vgr_trl.rewards.quantities import read_quantity

_EMPHASISED = re.compile(r"\*\*(.+?)\*\*(?!\s*:)|\\\((.+?)\\\)|\$([^$]+)\$|[“「\"](.+?)[”」\"]")
_NUMBER_START = re.compile(r"(?:(?<=[a-z] )|(?<=[\u4e00-\u9fff]{2})|(?<=[\u4e00-\u9fff]{2} ))[-+$€£¥]{0,2}\d")
# 4 queries with a value above 3
_COUNTED = re.compile(r"([\w$€£.,]+ (?!(?:in|at|of|to|per) )[a-z-]+) (?=(?!than\b)[a-z])", re.IGNORECASE)
_DATE_COMMA = re.compile(r"\b([A-Z][a-z]{2,8} \d{1,2}|of [A-Z][a-z]{2,8}), (?=\d{4}\b)")
_REMARK = re.compile(r"(?<=\w)(\*{0,2}) ?\((?!or\b|alternatively|maybe|或|也)[^()]*[a-z]{3}[^()]* [^()]*\)[\s.*]*$")
_FACTOR = re.compile(r"(\d) ?\$(\\[^$]*|[a-z])\$")  # 16 $\pi$
_JOIN_BEHIND = re.compile(rf"(?:{WORDS['joins'].pattern})\s*$", re.IGNORECASE)
_QUOTED = re.compile(r"[“「\"].+?[”」\"]")
BULLETS = re.compile(r"^(?:-[\s*_`\"']+)+")  # not the sign of -5


def cut_openers(text: str) -> str:
    """Return `text` without the words before its answer, such as `So there are about`."""
    for _ in range(5):
        text = text.lstrip(MARKS + ":,—≈~=#")
        match = WORDS["openers"].match(text)
        if match is None or not strip_wrapping(text[match.end() :]):
            break
        text = text[match.end() :]
    return text


def cut_reason(text: str) -> str:
    """Return `text` without the reason behind its answer."""
    for match in re.finditer(r"[\s,;:(。]+", text):
        is_contrast = match[0].strip() and WORDS["denies"].match(text, match.end())
        if match.start() and (is_contrast or WORDS["reasons"].match(text, match.end())):
            return text[: match.start()]
    return text


def find_polarity(clause: str) -> set[str]:
    """Return `yes` and `no` if parts of a clause are nothing but that."""
    pieces = re.split(r"[,.;:。!]|\s[-–—]\s", clause)
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
    clause = _FACTOR.sub(r"\1 \2", clause)
    cut = _REMARK.sub(r"\1", WORDS["so"].split(cut_reason(_DATE_COMMA.sub(r"\1 ", clause)))[-1])
    if WORDS["reasons"].match(cut.lstrip(MARKS)):
        cut = cut.partition(", ")[2] or cut
    shorter = [] if why_no_value(clause) else find_polarity(clause) or [cut, *_shorten(cut)]
    return tuple(dict.fromkeys(filter(strip_article, (clause, *map(strip_wrapping, shorter)))))


def _shorten(clause: str) -> Iterator[str]:
    """Yield the phrase behind the last verb, else the end of the clause; then shorter phrases within it.

    The only emphasised words end the search. Bounds and comparisons (`more than 20`) stay whole.
    """
    opened = cut_openers(clause)
    phrase, is_said = opened, bool(WORDS["verbs"].search(clause[: len(clause) - len(opened)]))
    if not is_said and (verbs := list(WORDS["verbs"].finditer(opened))):
        phrase, is_said = cut_openers(re.split(r"(?<![\d\s]): ", opened[verbs[-1].end() :])[-1]), True
        if read_quantity(opened.split(" ")[0]):  # 50% of them are red
            phrase = "" if re.search(r"\d", phrase) else opened[: verbs[-1].start()]
    elif not is_said and ": " in opened:
        phrase, is_said = opened.rpartition(": ")[2], True
    place = WORDS["places"].search(phrase)
    if OR.search(phrase[: place.start()] if place else phrase):
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
    lead = None if WORDS["bounds"].search(phrase) else WORDS["leads"].match(phrase)
    while lead and strip_wrapping(phrase[lead.end() :]):
        phrase = phrase[lead.end() :]
        yield phrase
        lead = WORDS["leads"].match(phrase)
    if place := WORDS["places"].search(phrase):
        yield phrase[: place.start()]


def _first_part(phrase: str) -> str:
    """Return a phrase up to its first comma, unless its parts are a list."""
    pieces = split_list(phrase.rstrip(MARKS + STOPS))
    is_list = all(len(piece.split()) <= 4 and not WORDS["verbs"].search(piece) for piece in pieces)
    if is_list and (len(pieces) > 2 or not WORDS["articles"].match(pieces[-1].strip())):
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
