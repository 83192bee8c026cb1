"""Extract the answer that a text states, and compare it with the reference answer of a row.

In this order: the text of a completion, the part of it that states an answer, options of multiple choice, open answers,
the reference answer of a row. The rules are `Stated answer` in definitions.md. A text is read without the reference;
`phrases.py` finds what a clause says, and `equality.py` compares open answers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from numbers import Real
from typing import Any, NamedTuple

from vgr_trl.errors import RewardError
from vgr_trl.rewards.equality import is_same_open_answer, is_same_value, is_value
from vgr_trl.rewards.phrases import (
    BULLETS,
    MARKS,
    OR,
    POLARITY,
    STOPS,
    TABLES,
    WORDS,
    compile_words,
    cut_openers,
    cut_reason,
    find_phrases,
    find_polarity,
    fold,
    normalise,
    read_quantity,
    strip_article,
    strip_wrapping,
    to_half_width,
    why_no_value,
)


def completion_text(completion: Any) -> str:
    """Return the assistant's text of a completion, its messages joined by line breaks.

    Args:
        completion: as TRL passes it, a string or a list of messages; the content of a message is a string, None or a
            list of parts, of which the text counts. Messages of other roles (tools) do not count.

    Raises:
        RewardError: the completion is neither a string nor a list.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise RewardError(f"A completion is a {type(completion).__name__}: pass a string, or a list of messages.")
    written = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return "\n".join(_message_text(message.get("content")) for message in written)


ANSWER_TAGS = "<think></think><answer></answer>"


def decode_with_tags(tokenizer: Any, completion_ids: Any, text: str = ANSWER_TAGS) -> list[str]:
    """Decode completions without special tokens, but with those special tokens that are tags.

    Args:
        tokenizer: the tokenizer.
        completion_ids: tokens of each completion, lists of ints.
        text: opens and closes the tags, as a system prompt does.
    """
    pairs = {*re.findall(r"<(\w+)>", text)} & {*re.findall(r"</(\w+)>", text)}
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    tags = {token for token, content in special.items() if content.strip("</>") in pairs}
    rows = [
        [token for token in ids if token in tags or token not in special] if tags else ids for ids in completion_ids
    ]
    return [tokenizer.decode(ids, skip_special_tokens=not tags) for ids in rows]


def _message_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content or ())


def excerpt(value: Any) -> str:
    """Return a value as text of at most 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _compile_statements(language: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return what each rule seeks in lower-case text of a language."""
    start = _WORD_START if TABLES[language]["anchors"][0].isascii() else ""
    states, confirms = (compile_words(name, language, flags=re.NOFLAG).pattern for name in ("states", "confirms"))
    return [("statement", re.compile(f"{start}(?:{states})", re.MULTILINE)), ("confirmation", re.compile(confirms))]


_WORD_START = "(?<![a-z])"  # makes a search twice as fast
_STATEMENTS = {language: _compile_statements(language) for language in TABLES}
_ANCHOR_WORDS = list(dict.fromkeys(anchor for table in TABLES.values() for anchor in table["anchors"]))
_ANCHORS = (  # two patterns are far faster than one
    re.compile(rf"\b(?:{'|'.join(filter(str.isascii, _ANCHOR_WORDS))})", re.ASCII),
    re.compile("|".join(each for each in _ANCHOR_WORDS if not each.isascii())),
)
_THINK = r"(?:[<◁\[]{0}(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)[>▷\]]|<\|{1}_of_thought\|>)"
_THOUGHT_END = re.compile(_THINK.format("/", "end"), re.IGNORECASE | re.ASCII)
_THOUGHT = re.compile(
    rf"{_THINK.format('', 'begin')}.*?(?:{_THOUGHT_END.pattern}|\Z)", re.IGNORECASE | re.ASCII | re.DOTALL
)
_ANSWER_START, _ANSWER_END = (
    re.compile(rf"<{slash}(?:final_?)?(?:answer|conclusion)>", re.IGNORECASE | re.ASCII) for slash in ("", "/")
)
_SPECIAL_TOKEN = re.compile(
    r"<\|(?!begin_of_box|end_of_box)[^<>|\s]{1,30}\|>(?:assistant\b)?|</?s>|</answer>?\s*\Z|\[(?:EOS|PAD)\]"
    r"|<(?:eos|pad|unk|end_of_turn|end_of_utterance)>"
    "|[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u2714\ufe0f]"
)
_BOX = re.compile(r"\\f?boxed\s{0,9}\{|<\|begin_of_box\|>")
_BOX_SEPARATOR = re.compile(
    r"(?:\}|<\|end_of_box\|>)[\s$.,;/&、()\\\[\]]{0,9}(?:or|and|或者?|和)?[\s$(\\\[\]]{0,9}", re.IGNORECASE
)
_DENIED_BOX = re.compile(
    rf"[}}$)\\\]*\s]{{0,9}}(?:(?:is|was|would be)\s(?:{WORDS['denies'].pattern})|是?(?:错|不对|不正确))", re.IGNORECASE
)
_JSON = re.compile(r"(?:^|\n)\s*(?:```(?:json)?\s*)?(\{[^{}]{1,2000}\}|\[[^\[\]]{1,2000}\])[\s`]*\Z")
_JSON_KEY = re.compile(r"(?:\w+_)?(?:answer|option|choice|result|prediction|solution|letter|label)", re.IGNORECASE)
_SENTENCE_END = re.compile(
    r"[.!?](?<!\b(?:vs|Mr|Ms|Dr|St).)(?<![ .][K-Z].)(?=[*\"')]{0,3}(?:\s|$))(?![*)]{0,2}[\"'][*)]{0,2} [a-z])|[。\n]"
)
_BEFORE_CLAUSE = re.compile(r"(?:[\s:*_`\"'“]|-(?=\s))*(?:(?:\\[\[(]|\$\$?)\s*\n\s*)?")
_ITEM = re.compile(r"[\s*>-]*(?:option\s)?\(?([A-J])(?:\*{0,2}[).:、]|\*\*|[\s*]*$)", re.IGNORECASE)
_BARE = re.compile(r"[\s*>$-]*(?:\d{1,2}[.)]\s)?(?:[^\s:=]|:(?=\S))+(?: [+*/-])?(?: [^\s:=]+)?\s*")
_LISTED = re.compile(r"(?:^|[\s;,(*])\(?([A-J])(?:[).:、]|\*\*)")
_HASHES = re.compile(r"####\s*([^\n#]+)\s*$")
_MAX_REACH, _MAX_STATEMENTS = 300, 20  # characters read on each side of a statement; statements read, the last ones
_MAX_PART_LENGTH = 2000  # characters
_MAX_EXTRA = 40  # characters of an item more than of the longest option
_MARGIN = 100  # characters of a statement before its anchor, and half of those behind
_MAX_LINE_LENGTH, _MAX_LINE_WORDS = 80, 8  # of a line that states an open answer


@dataclass(frozen=True)
class Answer:
    """The answer that a text states.

    Attributes:
        rule: form of the statement: `tag`, `box`, `hashes`, `json`, `statement`, `confirmation`, `line` or `sentence`.
        part: text that states the answer.
        value: 0-based index of the stated option, or the open answer.
        excluded: why the part states no single answer; empty if it states one.
    """

    rule: str
    part: str
    value: int | str | None = None
    excluded: str = ""


def stated_answer(text: str, choices: Sequence[str] = (), *, is_open: bool = False) -> Answer | None:
    """Return the answer that `text` states, None if it states none (`Stated answer` in definitions.md).

    Args:
        text: a completion, or a reference answer.
        choices: texts of the options; empty: options are known by letter only.
        is_open: whether the question is open.
    """
    text = to_half_width(text)
    tagged = None
    if has_signs := any(sign in text for sign in "<[◁"):  # most long texts have no tags and tokens
        text = strip_thought(text)
        tagged = answer_tag(text)
    if has_signs or not text.isascii():
        text = _SPECIAL_TOKEN.sub("", text if tagged is None else tagged)
    for rule, part in _find_parts(text, tagged is not None, choices):
        part = (part if rule in ("box", "hashes", "json", "tag") else BULLETS.sub("", part.lstrip()))[:_MAX_PART_LENGTH]
        answer = _read_open(part, rule) if is_open else _read_option(part, rule, choices)
        if answer is not None:
            return answer if tagged is None else replace(answer, rule="tag", part=tagged.strip())
    return None if tagged is None else Answer("tag", tagged.strip(), excluded="no answer in the tag")


def strip_thought(text: str) -> str:
    """Return `text` without the content of `<think>` and its like.

    Text before an unopened `</think>` is thought too, since chat templates often put `<think>` in the prompt; so is
    text after an unclosed `<think>`.
    """
    return _THOUGHT_END.split(_THOUGHT.sub("\n", text))[-1]


def answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>` of `text`, which may lack its end, or None."""
    pieces = [_ANSWER_END.split(piece, maxsplit=1) for piece in _ANSWER_START.split(text)[1:]]
    found = [piece[0] for piece in pieces if len(piece) > 1 or piece[0].strip()]
    return found[-1] if found else None


def _find_parts(text: str, in_tag: bool, choices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (rule, part of the text that may state the answer) in order of precedence."""
    if (box := _last_box(text)) is not None:
        yield "box", box
    while courtesy := WORDS["courtesies"].search(text, max(0, len(text) - _MAX_REACH)):
        text = text[: courtesy.start()]
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    while len(lines) > 1 and WORDS["reasons"].match(lines[-1].lstrip(MARKS)):
        lines.pop()
    if lines and (hashes := _HASHES.search(lines[-1])):
        yield "hashes", hashes[1]
    if (value := _read_json(text)) is not None:
        yield "json", value
    yield from islice(_find_statements(text), _MAX_STATEMENTS)
    if in_tag:
        yield "tag", text
    sentences = _split_sentences(lines[-1]) if lines else []
    if _are_items(lines[-2:], choices) or _are_items(sentences, choices) or _are_bare(lines):
        return
    if lines:
        yield "line", lines[-1]
        if not lines[0].rstrip(MARKS).endswith(":"):
            yield "line", lines[0]
    for sentence in sentences:
        start = sentence.lstrip(MARKS)
        is_explanation = WORDS["pronouns"].match(start) and cut_openers(start) == start  # "It has three valves."
        if sentence is sentences[-1] or not is_explanation:
            yield "sentence", sentence


def _are_items(lines: Sequence[str], choices: Sequence[str]) -> bool:
    """Whether two lines are different options, or items of a list of options."""
    longest = max(map(len, choices), default=0) + _MAX_EXTRA
    short = {strip_article(line) for line in lines if len(line) <= longest}
    if len(short & {*map(strip_article, choices)}) > 1:
        return True
    first, second = (_ITEM.match(line) for line in (lines[0], lines[-1])) if lines else (None, None)
    return bool(first and second) and first[1].upper() != second[1].upper()  # type: ignore[index]


def _are_bare(lines: Sequence[str]) -> bool:
    """Whether a text is nothing but several lines of a few words."""
    are_bare = all(_BARE.fullmatch(line) and not WORDS["verbs"].search(line) for line in lines)
    return are_bare and len(lines) > 1 and lines[-1] not in lines[:-1]


def _last_box(text: str) -> str | None:
    """Return the content of the last box, or of the last two if only `or` separates them."""
    boxes = list(_BOX.finditer(text))[-2:] if "box" in text else []
    contents = [
        text[box.end() :].partition("<|end_of_box|>")[0] if box[0][0] == "<" else _read_braces(text[box.end() :])
        for box in boxes
    ]
    if len(boxes) == 2:
        between = text[boxes[0].end() + len(contents[0]) : boxes[1].start()]
        if _BOX_SEPARATOR.fullmatch(between) and contents[0] != contents[1]:
            return " or ".join(contents)
    if contents and _DENIED_BOX.match(text, boxes[-1].end() + len(contents[-1])):
        return ""
    return contents[-1] if contents else None


def _read_braces(text: str) -> str:
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return ""


def _read_json(text: str) -> str | None:
    """Return the answer of the JSON at the end of `text`: a list, or the value of its only key or its last answer."""
    is_json = text.rstrip("` \r\n").endswith(("}", "]"))
    found = _JSON.search(text, max(0, len(text) - _MAX_PART_LENGTH)) if is_json else None
    with suppress(ValueError):
        read = json.loads(found[1]) if found else None
        if isinstance(read, dict):
            answers = [value for key, value in read.items() if _JSON_KEY.fullmatch(key)] or list(read.values())
            read = answers[0] if len(answers) == 1 else " or ".join(map(str, answers))
        read = ", ".join(map(str, read)) if isinstance(read, list) else read
        return str(read) if isinstance(read, str | int | float) else None
    return None


def _find_statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield the clauses after statement words and before confirmations, last one first."""
    lowered = text.lower() if len(text.lower()) == len(text) else text
    for line in reversed(list(re.finditer(r".+", text))):
        start, end = line.span()
        patterns = _ANCHORS[:1] if line[0].isascii() else _ANCHORS
        anchors = [anchor for pattern in patterns for anchor in pattern.finditer(lowered, start, end)]
        said = {anchor[0] for anchor in anchors}
        if anchors:
            places = [anchor.start() for anchor in anchors]
            start, end = max(start, min(places) - _MARGIN), min(end, max(places) + 2 * _MARGIN)
        found = [
            (match.end() if rule == "statement" else match.start(), rule, match)
            for language, rules in _STATEMENTS.items()
            if not said.isdisjoint(TABLES[language]["anchors"])
            for rule, pattern in rules
            for match in pattern.finditer(lowered, start, end)
        ]
        for _, rule, match in sorted(found, key=lambda each: each[0], reverse=True):
            before = _SENTENCE_END.split(text[max(start, match.start() - _MAX_REACH) : match.start()])[-1]
            if WORDS["unless"].search(before) or WORDS["refuses"].search(re.split("[,;]", before)[-1]):
                continue
            if rule == "statement":
                yield rule, _first_clause(text[match.end() : match.end() + _MAX_REACH])
            elif before.strip():
                yield rule, before


def _first_clause(text: str) -> str:
    """Return the first sentence of `text`, on the next line if this one is empty."""
    start: Any = _BEFORE_CLAUSE.match(text)
    line, _, further = text[start.end() :].partition("\n")
    for end in _SENTENCE_END.finditer(line):
        behind = line[end.end() :].lstrip(MARKS)
        is_item = behind and line[end.start()] == "." and _ITEM.fullmatch(line[: end.end()])  # "A. red"
        is_word = behind[:1] in ("A", "I") and _FOLLOWED_BY_WORD.match(behind, 1)  # "C. A floor lamp"
        is_next = (
            (not is_word and _LETTER.match(behind)) or WORDS["reasons"].match(behind) or cut_openers(behind) != behind
        )
        is_own_text = is_item and not is_next
        if not (is_own_text or WORDS["joins"].match(behind)):  # "A. Or B."
            return line[: end.end()]
    following = further.lstrip().partition("\n")[0].rstrip(MARKS + STOPS + ")")
    is_list = "\n" in start[0] and _BARE.fullmatch(further.partition("\n")[0])
    return f"{line}; {following}" if is_list or _ITEM.fullmatch(following) or WORDS["joins"].match(following) else line


def _split_sentences(line: str) -> list[str]:
    """Split a line into sentences, last one first."""
    ends = [end.end() for end in _SENTENCE_END.finditer(line) if not re.search(r"\b[A-J]$", line[: end.start()][-2:])]
    ends = [0, *ends, len(line)]
    found = [line[start:end] for start, end in pairwise(ends)]
    return [sentence for sentence in found if strip_wrapping(sentence)][: -_MAX_STATEMENTS - 1 : -1]


LETTERS = "ABCDEFGHIJ"
_TWO, _DENIED = "two answers", "a denial, bound or comparison"

_LETTER = re.compile(
    r"[(\[]\s?(?P<bracketed>[A-Ja-j])\s?[)\]]"
    r"|(?<![A-Za-z0-9_'’^\\=(])(?<!N/)(?P<plain>[A-J])(?![A-Za-z0-9_'’^+]|\s?="
    r"|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3](?<![选選項项是为正因和或对不错ですがはまか都吧입]))"
)
_NAMES_LETTER = re.compile(r"[(\[]\s?[A-Ja-j]\s?[)\]]|(?<![A-Za-z])[A-J](?![A-Za-z])")
_SMALL_LETTER = re.compile(r"\(?\s?([a-j])\s?(?:[).:]|$)")
_FOLLOWED_BY_WORD = re.compile(
    r"\s+(?!(?:or|and|nor|o|ou|oder|et|und|is|are|was|because|since|as|which|with|on|in|at|to|of|for|but|then|here)\b)"
    r"[A-Za-z]{2}|\s+(?!o\b)[a-z]\b"
)
_IS = re.compile(
    r"(?:\.(?=[\"'”]))?[\s)\]*_\"'”]{0,4}(?:选项|項|项)?(?:(?:is|was|are|were|would be)\s|是)?"
    r"(?:(?:also|clearly|definitely)\s)?(?:的(?:说法|描述|表述)?)?"
)
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}|\\[()\[\]]|\$")
_CLAUSE_END = re.compile(r"[)\]*_`\"'”]{0,4}(?:\s*[.:)、。,;(!]|\s+[-–—]\s|\s*$|\s*(?:因为|because\b|since\b|选项))")
_TEXT_END = re.compile(  # of an option's text in a sentence; ideographs have no spaces
    rf"{_CLAUSE_END.pattern}|{WORDS['places'].pattern}|[*\"'”]{{0,3}}(?:\s*/|\s+(?:or|and)\b|,)|[\u4e00-\u9fff]",
    re.IGNORECASE,
)
_CLAUSES = ("statement", "confirmation", "sentence")
_SEPARATOR = re.compile(
    r"[;,、|\n→]|\s/\s|[-=]>|\s(?:and|or|vs\.?|&|as well as|oder|und|ou|et|o|y)\s|或者?|和",
    re.IGNORECASE,
)
_AGREES = re.compile(r"\b(?:is|are|was|were|does|do|did|has|have|can) ?n(?:o|['’])t\b")  # No, it is not.
_DASH = re.compile(r"^(?:[-–—:]+\s+|\\[ ,;]|~)")  # not the sign of -5
_SEGMENT_END = re.compile(r"[。;\n]|[.](?!\d)|\s[-–—]\s|(?=,)|(?<=\S)\s*(?=\()")


class _Place(NamedTuple):
    """Where a clause names an option."""

    start: int
    end: int
    option: int


def _read_option(part: str, rule: str, choices: Sequence[str]) -> Answer | None:
    """Return the option that a part names: by its letter, with its own text or none, else by its text."""
    if rule == "sentence" and choices and not (_NAMES_LETTER.search(part) or _may_say(part, choices)):
        return None  # as most sentences of a long text
    whole = strip_wrapping(part)
    named = {i for i, each in enumerate(choices) if len(whole) > 1 and strip_article(each) == strip_article(whole)}
    if named and whole.endswith("?") and not any(choices[i].endswith("?") for i in named):
        return Answer(rule, part.strip(), excluded="a question")
    problem = _TWO
    if not named and len(listed := _find_listed(part, choices)) > 1:
        named = listed
    elif not named:
        text = _LATEX.sub(r"\1", cut_openers(BULLETS.sub("", part.rstrip(MARKS) if rule in _CLAUSES else whole)))
        places = [] if rule == "sentence" else _find_letters(text, len(choices) or len(LETTERS))
        read = _read_letters(text, rule, choices, places) if places else None
        if read is None and (places or rule == "line"):
            return None
        is_list = read is None and _are_only_options(whole, choices)
        named, problem = read or ((set(), _TWO) if is_list else _read_texts(text, rule, choices))
        if not (named or problem):
            named = _find_same(part, choices)
            named |= {place.option for place in _find_texts(text, choices)} if named else set()
    if len(named) == 1:
        return Answer(rule, part.strip(), min(named))
    is_stated = rule in ("box", "hashes", "json") or (
        rule == "statement" and 0 < len(whole.split()) <= _MAX_LINE_WORDS and not WORDS["points"].match(whole)
    )
    problem = problem or (_TWO if named else "no option" if is_stated else "")
    return Answer(rule, part.strip(), excluded=problem) if problem else None


def _read_letters(text: str, rule: str, choices: Sequence[str], places: list[_Place]) -> tuple[set[int], str] | None:
    """Return the options that the letters of a clause name, and the problem if it is not one; None if they name none.

    A box, a tag and a line have to begin with the letter, and on a line no word of a sentence may follow it.
    """
    start, end, index = places[0]
    head = len(cut_reason(text))
    is_head = not text[:start].strip(MARKS + "([{")
    if WORDS["withdraws"].search(text, end):
        return set(), _DENIED
    if is_head:
        own = _find_own_text(text[end:], choices, index) if choices else set()
        behind = text[end:].replace(choices[index], "") if own else text[end:head]
        listed = {LETTERS.index(letter) for letter in _LISTED.findall(behind)} | {index}
        if own or len(listed) > 1:
            return listed | own, _TWO if len(listed) > 1 else "a letter with another option's text"
    is_line = is_head and _CLAUSE_END.match(text, end)
    if not (is_line if rule == "line" else is_head or rule in _CLAUSES):
        return None
    places = [place for place in places if place.start < head] or places
    named = {place.option for place in places if not _is_denied(text, place)}
    stop = _SENTENCE_END.search(text, end, head)
    is_refused = WORDS["refuses"].search(text[: stop.end() if stop else head]) or (
        len({place.option for place in places}) > 1 and WORDS["bounds"].search(text[: places[-1].start])
    )
    return (set(), _DENIED) if is_refused or not named else (named, _TWO)


def _read_texts(text: str, rule: str, choices: Sequence[str]) -> tuple[set[int], str]:
    """Return the options that a clause names by their words, and the problem if it is not one."""
    head, places = len(cut_reason(text)), _find_texts(text, choices)
    if places and WORDS["withdraws"].search(text, places[0].end):
        return set(), _DENIED
    polarities, said_of = [POLARITY.get(normalise(choice)) for choice in choices], find_polarity(text)
    if all(polarities) and len(said_of) == 1 and said_of <= {*polarities}:
        denied = _AGREES.sub("", text) if "no" in said_of else text
        if not WORDS["refuses"].search(denied):
            return {polarities.index(min(said_of))}, ""
    item = _ITEM.match(text[: places[0].start]) if places else None
    if item and item[1].isupper() and LETTERS.index(item[1]) >= len(choices):  # E. red
        return set(), "a letter with another option's text"
    if any(place.start < head for place in places):
        text, places = text[:head], [place for place in places if place.start < head]
    if concluded := _find_texts(WORDS["so"].split(text)[-1], choices):
        text, places = WORDS["so"].split(text)[-1], concluded
    start = max((verb.end() for verb in WORDS["verbs"].finditer(text)), default=0)
    last = {place.option for place in places if start <= place.start}
    if len(last) > 1:
        return last, _TWO
    if rule in ("sentence", "tag"):
        places = [p for p in places if _TEXT_END.match(text, p.end)]
        brackets = [place for place in _find_letters(text, len(choices)) if text[place.start] in "(["]
        said = WORDS["verbs"].split(text)[-1]
        if rule == "sentence" and _LETTER.fullmatch(said.strip(MARKS + STOPS)) and not why_no_value(text):
            return {place.option for place in _find_letters(said, len(choices))}, _TWO
        places += [p for p in brackets if places or p.option in _find_own_text(text[p.end :], choices, p.option)]
    if not places:
        is_said = rule == "sentence" and WORDS["verbs"].search(text)
        phrases = {strip_article(phrase) for phrase in find_phrases(text)} if is_said else set()
        return {index for index, choice in enumerate(choices) if strip_article(choice) in phrases}, ""
    before, behind = text[: places[0].start], text[places[-1].end :]
    around = " ".join([*before.split()[-2:], "|", *behind.split()[:1]])
    if len({place.option for place in places}) == 1 and OR.search(around):
        return set(), _TWO
    named = {place.option for place in places if not _is_denied(text, place)}
    rest = text
    for place in reversed(places):
        rest = rest[: place.start] + rest[place.end :]
    return (set(), _DENIED) if not named or WORDS["refuses"].search(rest) else (named, _TWO)


def _find_letters(text: str, number: int) -> list[_Place]:
    """Return the places of the letters of options."""
    found = []
    for match in _LETTER.finditer(text):
        before = text[max(0, match.start() - 40) : match.start()]
        letter = match["bracketed"] or match["plain"]
        is_word = match["plain"] and letter in "AI" and _FOLLOWED_BY_WORD.match(text, match.end())
        index, is_place = LETTERS.index(letter.upper()), match["bracketed"] and WORDS["refers"].search(before)
        if index < number and not is_place and not (is_word and not WORDS["option"].search(before)):
            found.append(_Place(match.start(), match.end(), index))
    small = None if found else _SMALL_LETTER.match(text)
    if small is not None and (index := LETTERS.index(small[1].upper())) < number:
        return [_Place(0, small.end(), index)]
    return found


def _find_own_text(behind: str, choices: Sequence[str], index: int) -> set[int]:
    """Return the option whose text follows a letter: `index` for its own, others, -1 for another value, or none."""
    behind = _DASH.sub("", behind.lstrip(MARKS + STOPS + ")]"))
    segments = [behind, *(behind[: end.start()] for end in islice(_SEGMENT_END.finditer(behind), 3))]
    found = (
        _find_same(segment.strip(MARKS + "()" * segment.startswith("(")), choices) for segment in segments if segment
    )
    if same := next(filter(None, found), None):
        return {index} if index in same else same
    if _compile_choice(choices[index]).match(behind):
        return {index}
    return {-1} if is_value(segments[1 % len(segments)]) and is_value(choices[index]) else set()


def _find_listed(text: str, choices: Sequence[str]) -> set[int]:
    """Return the options that the parts of a list are, by letter or text; none if a letter has a list as its text."""
    found, text = set[int](), cut_openers(cut_reason(text[:_MAX_REACH]))
    longest = max(map(len, choices), default=0) + _MAX_EXTRA
    for piece in _SEPARATOR.split(text) if choices else ():
        item = _ITEM.match(piece)
        rest = piece[item.end() :] if item else piece
        if item and (index := LETTERS.index(item[1].upper())) < len(choices):
            found.add(index)
            if not found - {index} and strip_article(text[item.end() :]) == strip_article(choices[index]):
                return {index}
        else:
            is_short = 0 < len(rest) <= longest
            found |= {index for index, choice in enumerate(choices) if is_short and is_same_value(choice, rest)}
    return found


def _are_only_options(text: str, choices: Sequence[str]) -> bool:
    """Whether a text is nothing but the texts of different options, with or without joints."""
    text, found = text[:_MAX_REACH], 0
    for choice in sorted(choices, key=len, reverse=True):
        rest = _compile_choice(choice).sub("", text)
        text, found = rest, found + (rest != text)
    return found > 1 and not WORDS["joins"].sub("", text).strip(MARKS + STOPS + "()/|&$-–—、")


def _may_say(text: str, choices: Sequence[str]) -> bool:
    """Whether a text can state an option: it has the words of one, or an option may be said in other words."""
    folded = fold(text)
    return any(words in folded for words in map(_words_of, choices))


@lru_cache(4096)
def _words_of(choice: str) -> str:
    """Return the words that each statement of an option has; none for numbers and the like."""
    words = strip_article(choice)
    has_one_form = words.replace(" ", "").isalpha() and not (words in POLARITY or read_quantity(words))
    return words if has_one_form else ""


def _find_same(text: str, choices: Sequence[str]) -> set[int]:
    """Return the options that are the same answer as `text`: the same text, else the same value."""
    same = {index for index, choice in enumerate(choices) if strip_article(choice) == strip_article(text)}
    return same or {index for index, choice in enumerate(choices) if is_same_open_answer(choice, text)}


def _find_texts(text: str, choices: Sequence[str]) -> list[_Place]:
    """Return the places of the options' words; numbers and formulas have none."""
    places = [
        _Place(*match.span(), index)
        for index, choice in enumerate(choices)
        if re.search(r"[^\W\d_]{2}|[\u4e00-\u9fff]", choice) and read_quantity(choice) is None and "\\" not in choice
        for match in _compile_choice(choice).finditer(text)
    ]
    longest = [max(p.end - p.start for p in places if p.start <= one.start and one.end <= p.end) for one in places]
    return sorted(one for one, length in zip(places, longest, strict=True) if one.end - one.start == length)


def _is_denied(text: str, place: _Place) -> bool:
    """Whether the clause of an option denies it, or compares something with it."""
    before = re.split(r"[,;:。]", WORDS["so"].split(text[max(0, place.start - 40) : place.start])[-1])[-1]
    behind = text[_IS.match(text, place.end).end() :]  # type: ignore[union-attr]
    is_denied = WORDS["denies"].search(before) or WORDS["bounds"].search(WORDS["verbs"].split(before)[-1])
    return bool(is_denied or WORDS["denies"].match(behind) or WORDS["bounds"].match(behind))


@lru_cache(maxsize=4096)
def _compile_choice(choice: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, _LATEX.sub(r"\1", to_half_width(strip_wrapping(choice))).split()))
    return re.compile(rf"(?<![A-Za-z0-9])(?<!\w-){words or '(?!)'}(?![A-Za-z0-9]|[.,]\d)", re.IGNORECASE)


def _read_open(part: str, rule: str) -> Answer | None:
    """Return the open answer that a part states, or None. A line counts if it is short, or says Yes or No."""
    whole = part.strip()
    is_long = len(whole.split()) > _MAX_LINE_WORDS or len(whole) > _MAX_LINE_LENGTH
    if not strip_wrapping(whole) or (rule == "line" and is_long and not find_polarity(whole)):
        return None
    return Answer(rule, part.strip(), value=whole, excluded=why_no_value(whole))


_MAX_EXACT_NUMBER = 1e18  # floats far below it are exact integers
_MAX_GOLD_WORDS = 20  # of a reference answer that is not stated by a rule
_GOLD_LETTER = re.compile(r"\(?\s?([A-Ja-j])\s?[).:]?|(?:\(([A-Ja-j])\)|([A-Ja-j])\s?\))\s*\S[^\n]*")


@dataclass(frozen=True)
class Solution:
    """The reference answer of a row.

    Attributes:
        text: text of the right option, or the open answer.
        choices: options, if known.
        index: 0-based index of the right option, or of an answer that is a letter; None for other open answers.
        others: further accepted answers.
    """

    text: str
    choices: tuple[str, ...] = ()
    index: int | None = None
    others: tuple["Solution", ...] = ()


def resolve_solution(solution: Any, choices: Any = None, label_idx: Any = None) -> Solution:
    r"""Return the reference answer of a row (`Stated answer` in definitions.md).

    Args:
        solution: letter A–J, option text or 0-based index; without `choices` a letter, also as `(B)` or `B) blue`, or
            the open answer, text or number; or a text that states one of these, such as a worked solution that ends in
            `\boxed{42}`. True and False are yes and no. A list of texts, or the JSON of one, holds several answers of
            which each counts as right; a list of numbers is one answer. A string of digits is never an index.
        choices: texts of the 2 to 10 options in the order of their letters; None for an open question.
        label_idx: used if `solution` is None; a number is always a 0-based index.

    Raises:
        RewardError: the solution is missing, is none of the choices, is ambiguous, or is a long text without an answer;
            or the choices are not 2 to 10 different texts.
    """
    options = _parse_choices(choices)
    if solution is None and not options and _is_number(label_idx):
        if label_idx not in range(len(LETTERS)):
            raise RewardError(f"label_idx is {excerpt(label_idx)}: without choices give an index 0 to 9")
        return Solution(LETTERS[int(label_idx)], index=int(label_idx))
    solution = label_idx if solution is None else solution
    solution = solution.tolist() if hasattr(solution, "tolist") else solution
    if isinstance(solution, str) and solution.startswith('["'):  # a list, as tables of texts have it
        with suppress(ValueError):
            solution = json.loads(solution)
    accepted = [solution]
    if isinstance(solution, list | tuple) and solution:
        if all(map(_is_number, solution)):  # a box, a point, a vector
            numbers = ", ".join(map(_to_text, solution))
            accepted = [f"[{numbers}]" if len(solution) > 1 else solution[0]]
        elif all(isinstance(each, str) for each in solution):
            accepted = list(solution)
        else:
            raise RewardError(f"solution is {excerpt(solution)}: give a list of texts, or one of numbers")
    first, *others = dict.fromkeys(_resolve_one(each, options) for each in accepted)
    return replace(first, others=tuple(others))


def usable_solution(row: Mapping[str, Any]) -> Solution | None:
    """Return the reference answer of a row with the columns of `resolve_solution`, or None if it is unusable."""
    try:
        return resolve_solution(row.get("solution"), row.get("choices"), row.get("label_idx"))
    except RewardError:
        return None


def _resolve_one(solution: Any, options: tuple[str, ...]) -> Solution:
    if isinstance(solution, bool):
        word = "yes" if solution else "no"
        solution = next((option for option in options if POLARITY.get(normalise(option)) == word), word)
    if isinstance(solution, str):
        content = answer_tag(solution)
        solution = (solution if content is None else content).strip()
    if solution == "" or not (isinstance(solution, str) or _is_number(solution)):
        raise RewardError(f"solution is {excerpt(solution)}: give the right answer, a text or a number")
    if not options:
        return _resolve_open(_to_text(solution))
    index = int(solution) if _is_index(solution) else _find_choice(_to_text(solution), options)
    if index not in range(len(options)):
        accepted = f"a letter A to {LETTERS[len(options) - 1]}, an index 0 to {len(options) - 1}, or the text of one"
        raise RewardError(f"solution is {excerpt(solution)}, which is none of the choices: give {accepted}")
    return Solution(options[index], options, index)


@lru_cache(4096)
def _resolve_open(text: str) -> Solution:
    found = stated_answer(text, is_open=True)
    if found is not None and found.rule in ("box", "hashes", "statement") and strip_wrapping(found.part):
        text = strip_wrapping(cut_reason(found.part))
    elif len(text.split()) > _MAX_GOLD_WORDS:
        raise RewardError(f"solution is {excerpt(text)}, which states no answer: give it alone, or in \\boxed{{}}")
    letter = _GOLD_LETTER.fullmatch(strip_wrapping(to_half_width(text)))
    if letter is None:
        return Solution(text)
    index = LETTERS.index((letter[1] or letter[2] or letter[3]).upper())
    return Solution(LETTERS[index], index=index)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, not a bool, that floats represent exactly."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(abs(value) < _MAX_EXACT_NUMBER)


def _is_index(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer()


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(int(value) if _is_index(value) else value)


def _parse_choices(choices: Any) -> tuple[str, ...]:
    if choices is None:
        return ()
    choices = choices.tolist() if hasattr(choices, "tolist") else choices
    if isinstance(choices, list | tuple) and 2 <= len(choices) <= len(LETTERS):
        texts = [_to_text(choice) if isinstance(choice, str) or _is_number(choice) else "" for choice in choices]
        if len({fold(text) for text in texts} - {""}) == len(texts):
            return tuple(texts)
    differing = "2 to 10 texts that differ (case, width, white space and encoding of accents do not count)"
    raise RewardError(f"choices is {excerpt(choices)}: give {differing}, or None for an open question")


@lru_cache(4096)
def _find_choice(solution: str, options: tuple[str, ...]) -> int:
    """Return the option that a solution names, by letter, text or a statement; -1 if it names none."""
    read = _read_option(to_half_width(solution), "tag", options)
    exact = [i for i, option in enumerate(options) if to_half_width(option).strip() == to_half_width(solution).strip()]
    meant = sorted({*exact, *([read.value] if read and isinstance(read.value, int) else [])})
    meant = meant or [i for i, option in enumerate(options) if normalise(option) == normalise(solution)]
    if not meant and (stated := stated_answer(solution, options)) is not None:
        meant = [stated.value] if isinstance(stated.value, int) else []
    if len(meant) > 1:
        names = " or ".join(f"{LETTERS[index]} ({excerpt(options[index])})" for index in meant)
        raise RewardError(f"solution is {excerpt(solution)}, which could mean {names}: give the index of the option")
    return meant[0] if meant else -1


def states_answer(text: str, solution: Solution) -> bool:
    """Return whether a completion states any answer, right or wrong, of the kind of `solution`."""
    stated = stated_answer(text, solution.choices, is_open=solution.index is None)
    return stated is not None and not stated.excluded


def is_right(text: str, solution: Solution) -> bool:
    """Return whether a completion states `solution` or another accepted answer."""
    for gold in (solution, *solution.others):
        answer = stated_answer(text, solution.choices, is_open=gold.index is None)
        value = None if answer is None else answer.value
        if (
            is_same_open_answer(gold.text, value)
            if isinstance(value, str)
            else value is not None and value == gold.index
        ):
            return True
    return False
