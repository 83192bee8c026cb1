"""Read the one answer that a text states, and compare it with the reference answer of a row.

The order of strength (docs/answers.md): the last explicit statement; else a line that is only an answer; else the last
sentence. A text is read without the reference. `phrases.py` reads clauses, and `equality.py` compares open answers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise, repeat
from numbers import Real
from typing import Any, NamedTuple

from vgr_trl.errors import RewardError
from vgr_trl.rewards.equality import is_same_open_answer, is_value
from vgr_trl.rewards.phrases import (
    MARKS,
    POLARITY,
    STOPS,
    TABLES,
    behind,
    cut_fillers,
    cut_reason,
    find_polarity,
    fold,
    match,
    may_be_value,
    normalise,
    read_quantity,
    search,
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
    contents = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    parts = [[content] if isinstance(content, str) else content or () for content in contents]
    return "\n".join(
        "".join(part if isinstance(part, str) else part.get("text") or "" for part in message) for message in parts
    )


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


def excerpt(value: Any) -> str:
    """Return a value as text of at most 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


LETTERS = "ABCDEFGHIJ"
_MAX_REACH, _MAX_STATEMENTS, _MAX_PLACES = (
    300,
    20,
    100,
)  # characters of a statement; the last ones that are read; looked at
_MAX_LINE, _MAX_WORDS = 80, 8  # characters and words of a line that is an open answer

_THINK = r"(?:[<◁\[]{0}(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)[>▷\]]|<\|{1}_of_thought\|>)"
_THOUGHT_END = re.compile(_THINK.format("/", "end"), re.IGNORECASE | re.ASCII)
_THOUGHT = re.compile(
    rf"{_THINK.format('', 'begin')}.*?(?:{_THOUGHT_END.pattern}|\Z)", re.IGNORECASE | re.ASCII | re.DOTALL
)
_SPECIAL_TOKEN = re.compile(
    r"<\|(?!begin_of_box|end_of_box)[^<>|\s]{1,30}\|>(?:assistant\b)?|</?s>|\[(?:EOS|PAD)\]"
    "|<(?:eos|pad|unk|end_of_turn|end_of_utterance)>|[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u2714\ufe0f]"
)
_MARK = re.compile(r"\\boxed\s{0,9}\{|<\|begin_of_box\|>|<(?:final_?)?(?:answer|conclusion)>|####")
_MARK_END = re.compile(r"</?(?:final_?)?(?:answer|conclusion)>?|<\|end_of_box\|>", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"[^\w\n]{0,9}(?:(?:or\b|或)(?!\W*boxed)|(?:is|was) (?:wrong|incorrect|false|not)\b|是?[错不])"
)
_JSON = re.compile(r"(?:^|\n)\s*(?:```(?:json)?\s*)?([{\[].{1,2000}[}\]])[\s`]*\Z", re.DOTALL)
_JSON_KEYS = (r"(?:bbox|box|point)(?:_2d)?", r"(?:\w+_)?(?:answer|option|choice|result|letter|label)|答案|选项", ".*")
_ANCHORS = ["\\boxed", "<", "####", *TABLES["openers"].pop("anchors").split("|")]
_OPENER = re.compile("|".join(f"(?a:{pattern})" for pattern in TABLES["openers"].values()), re.MULTILINE)
_CONFIRMED, _IS = (re.compile(f"(?a:{TABLES['confirms'][name]})") for name in ("words", "verbs"))
_JOINED = re.compile(
    r"(?:[/&|;、]|\b(?:and|or)|或者?|和)(?: also)?(?: the)?[\s$(\\\[\]]*\Z|\}[\s$.,()}\\\[\]]*\Z", re.IGNORECASE
)
_SENTENCE_END = re.compile(
    r"[.!?](?<!\b(?:vs|Mr|Ms|Dr|St).)(?<![ .][K-Z].)(?=[*\"')]{0,3}(?:\s|$))(?![*)]{0,2}[\"'][*)]{0,2} [a-z])|[。\n]"
)
_LEADING = re.compile(r"(?:[\s:*_`\"'“]|-(?=\s))*(?:(?:\\[\[(]|\$\$?)\s*\n\s*)?")
_BULLETS = re.compile(r"^(?:-[\s*_`\"']+)+")  # not the sign of -5
_BARE = re.compile(r"[\s*>$-]*(?:\d{1,2}[.)]\s)?(?:[^\s:=]|:(?=\S))+(?: [+*/-])?(?: [^\s:=]+)?\s*")
_ITEM = re.compile(r"[\s*>-]*(?:[Oo]ption\s)?\(?([A-Ja-j])(?:\*{0,2}[).:、]|\*\*|[\s*]*$)")
_LETTER = (
    r"(?<![A-Za-z0-9_'’^\\=])(?:[A-J](?![A-Za-z0-9_'’^+]|\s?=)"
    r"(?![\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3](?<![选選项項是为正因和或对不错也で입]))|(?<=[(\[])[a-j](?=\s?[)\]]))"
)
_HEAD = re.compile(rf"[\s*_`\"'“$(\[{{]*({_LETTER}|[a-j](?=[*_`\s]*(?:[).:]|\Z)))[\s*_`\"'”)\]}}$]*")
_NAMED_LETTER = re.compile(
    rf"(?:(?<![A-Za-z0-9])[(\[]\s?|\b(?:[Oo]ption|[Cc]hoice|[Ll]etter)\s[(\"'*]*|选项\s?)({_LETTER})"
)
_WORD_BEHIND = r"(?!\s+(?!(?:or|and|nor|is|are|was|because|since|as|which|with|but|then|here)\b)[A-Za-z]{2}|\s+[a-z]\b)"
_OTHER_LETTER = re.compile(rf"{_LETTER}(?:(?<![AI])|{_WORD_BEHIND})")
_LABEL_END = re.compile(r"^(?:[)\]\s*_`.:;,。]|[-–—]\s|\\[ ,;!]|~)+")
_STOP_BEHIND = re.compile(r"\s*(?:[.:)、。,;(!-]|\Z|because\b|since\b|因为|选项|项)")
_ALSO = re.compile(  # another option behind the sentence of the first
    rf"[\s.。!;,]*(?i:or|and|maybe|perhaps|also|或者?|也|和)?[\s(*]*(?:[Oo]ption )?({_LETTER})[\s)*]*"
    r"(?:[.!。,;]|\Z|也|(?:is|may|might|could|would)(?: also| be)* (?:possible|right|correct))"
)
_WITHDRAWN = re.compile(
    r"\W*(?:(?:is|was|that is|that['’]s|which is) )?(?:clearly )?(?:wrong|incorrect|false|not (?:right|correct|true)"
    r"|(?:选项|项)?(?:的(?:说法|描述))?是?(?:错|不)|\+|的(?!说法|描述)|ではな|아니"
    r"|no, (?:that|this) is (?:wrong|incorrect))",
    re.I,
)
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}|\\[()\[\]]|\$")
_TEXT_END = re.compile(  # of an option's text in a sentence; ideographs have no spaces
    rf"[)\]*_`\"'”]{{0,4}}(?:\s*[.:)、。,;(!/]|\s+[-–—]\s|\s*$|\s+(?:or|and)\b|(?:{TABLES['words']['places']}))|[\u4e00-\u9fff]",
    re.IGNORECASE,
)


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


class _Statement(NamedTuple):
    start: int  # of its opening words
    content: int  # where its content starts
    end: int
    rule: str
    text: str


def stated_answer(text: str, choices: Sequence[str] = (), *, is_open: bool = False) -> Answer | None:
    """Return the answer that `text` states, None if it states none (`Stated answer` in definitions.md).

    Args:
        text: a completion, or a reference answer.
        choices: texts of the options; empty: options are known by letter only.
        is_open: whether the question is open.
    """
    text = to_half_width(text)
    if any(sign in text for sign in "<[◁"):  # most long texts have no tags and tokens
        text = _THOUGHT_END.split(_THOUGHT.sub("\n", text))[-1]
    if not text.isascii() or "<" in text or "[" in text:
        text = _SPECIAL_TOKEN.sub("", text)
    for rule, part in chain(_find_explicit(text), _find_plain(text, choices)):
        answer = _read_open(part.strip(), rule) if is_open else _read_option(part.strip(), rule, choices)
        if answer is not None:
            return answer
    return None


def _find_explicit(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rule and the content of explicit statements, the last one first; a joined pair is one content."""
    statements = islice(_find_statements(text), _MAX_STATEMENTS)
    one = next(statements, None)
    while one is not None:
        before = next(statements, None) if _JOINED.search(text[max(0, one.start - 40) : one.start]) else None
        if before is not None and before.text != one.text and before.rule == one.rule in ("box", "statement"):
            between = text[before.end if one.rule == "box" else before.content : one.start]
            if _JOINED.search(between) and not _SENTENCE_END.search(between):
                yield one.rule, f"{before.text} or {one.text}"
        lines = one.text.strip().splitlines()
        is_list = len(lines) > 1 and (_is_bare(lines) or (_ITEM.match(lines[0]) and _ITEM.match(lines[-1])))
        if one.rule == "tag" and len(lines) > 1 and not is_list:
            yield "tag", lines[-1]
        yield one.rule, one.text
        one = before or next(statements, None)


def _find_statements(text: str) -> Iterator[_Statement]:
    """Yield explicit statements, the last one first."""
    if (answer := _read_json(text)) is not None:
        yield _Statement(len(text), len(text), len(text), "json", answer)
    lowered = text.lower()
    anchors = [re.escape(anchor) for anchor in _ANCHORS if anchor in lowered]
    places = {place.start() for anchor in anchors for place in re.finditer(anchor, lowered)}
    for start in sorted(places, reverse=True)[:_MAX_PLACES]:
        if mark := _MARK.match(lowered, start):
            yield from _read_mark(text, mark)
        opener = _OPENER.match(lowered, start)
        confirmed = None if opener else _CONFIRMED.match(lowered, start)
        if not (opener or confirmed):
            continue
        clause = re.split(r"[.!?;](?=\s)|[。\n]", text[max(0, start - _MAX_REACH) : start])[-1]
        if search("conditions", clause) or search("unless", re.split("[,;:]", clause)[-1]):
            continue
        if opener:
            content = _read_line(text, opener.end())
            is_asked = content.rstrip(MARKS).endswith("?") or search("conditions", _SENTENCE_END.split(content)[0])
            if not (is_asked or match("points", content)):
                yield _Statement(start, opener.end(), opener.end(), "statement", content)
        elif confirmed and ((verb := _IS.search(clause.lower())) or not confirmed[0].isascii()):
            content = clause[: verb.start()] if verb else clause.rstrip("是为最")
            yield _Statement(start - len(clause), start, confirmed.end(), "confirmation", content)


def _read_mark(text: str, mark: re.Match[str]) -> Iterator[_Statement]:
    """Yield the content of a box, a tag or hashes, unless it is empty or taken back."""
    rest = text[mark.end() : mark.end() + 2000]
    rule = "tag" if mark[0][0] == "<" else "box"
    if mark[0] == "####":
        rule, content = "hashes", rest.partition("\n")[0]
        content = "" if len(content.split()) > _MAX_WORDS or content.strip().endswith(":") else content
    elif rule == "tag":
        rule, content = "box" if "box" in mark[0] else "tag", _MARK_END.split(rest, maxsplit=1)[0]
    else:
        closed = (number for number, depth in enumerate(accumulate(map(_BRACES.get, rest, repeat(0)))) if depth < 0)
        content = rest[: next(closed, 0)]
    end = mark.end() + len(content)
    if content.strip() and not (rule == "box" and _TAKEN_BACK.match(text, end)):
        yield _Statement(mark.start(), mark.end(), end, rule, content)


_BRACES = {"{": 1, "}": -1}


def _read_json(text: str) -> str | None:
    """Return the answer in JSON at the end of a text: a box, else the value of its only key for answers."""
    match = _JSON.search(text, max(0, len(text) - 2000)) if text.rstrip("` \r\n")[-1:] in ("}", "]") else None
    with suppress(ValueError):
        read = json.loads(match[1]) if match else None
        read = read[0] if isinstance(read, list) and len(read) == 1 else read
        if isinstance(read, dict):
            found = [[value for key, value in read.items() if re.fullmatch(names, key, re.I)] for names in _JSON_KEYS]
            answers = next(filter(None, found), [])
            read = answers[0] if len(answers) == 1 else " or ".join(map(str, answers))
        return str(read) if isinstance(read, str | int | float | list) else None
    return None


def _read_line(text: str, start: int) -> str:
    """Return the rest of a line, or the next line if it is empty; with the line behind if both are a list."""
    chunk = text[start : start + _MAX_REACH]
    leading: Any = _LEADING.match(chunk)
    line, _, further = chunk[leading.end() :].partition("\n")
    following = further.lstrip().partition("\n")[0]
    return f"{line}; {following}" if _ITEM.fullmatch(following) or match("joins", following) else line


def _find_plain(text: str, choices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the last line, the first and the last sentence, without courtesies; lines of a list are none."""
    lines = [line for line in text[-2 * _MAX_REACH :].splitlines() if re.search(r"\w", line)]
    sentences: list[str] = []
    while lines and not sentences:
        ends = [0, *(end.end() for end in _SENTENCE_END.finditer(lines[-1])), len(lines[-1])]
        sentences = [lines[-1][start:end] for start, end in pairwise(ends) if strip_wrapping(lines[-1][start:end])]
        while sentences and match("courtesies", sentences[-1].lstrip(MARKS)):
            sentences.pop()
        if not sentences or (len(lines) > 1 and match("reasons", lines[-1].lstrip(MARKS))):
            lines.pop()
            sentences = []
    if not lines:
        return
    line, items = "".join(sentences), [item[1].upper() for item in map(_ITEM.match, lines[-2:]) if item]
    is_alone = _ITEM.fullmatch(line) and not any(map(_ITEM.fullmatch, lines[:-1]))  # a letter behind a list
    is_listed = len({*map(strip_article, lines[-2:])} & {*map(strip_article, choices)}) > 1
    if is_listed or (not is_alone and (len({*items}) > 1 or (_is_bare(lines) and len(text) < _MAX_REACH))):
        return
    yield "line", line
    first = text[:_MAX_REACH].strip().partition("\n")[0]
    if len(lines) > 1 and not first.rstrip(MARKS).endswith(":"):
        yield "first line", first
    while len(sentences) > 1 and match("comments", sentences[-1].lstrip(MARKS)):
        sentences.pop()
    yield "sentence", sentences[-1]


def _is_bare(lines: Sequence[str]) -> bool:
    """Whether lines are nothing but several parts of a few words."""
    return len(lines) > 1 and all(_BARE.fullmatch(line) and not search("verbs", line) for line in lines)


def _read_option(part: str, rule: str, choices: Sequence[str]) -> Answer | None:
    """Return the option that a part names: as a whole, by its letter, or by its text."""
    text = _LATEX.sub(r"\1", cut_fillers(_BULLETS.sub("", part.strip(MARKS))))
    head = None if rule == "sentence" else _HEAD.match(text)
    is_open = not any(normalise(choice) in POLARITY for choice in choices)
    if "line" in rule and not head and is_open and len(text) > max(map(len, choices), default=0) + _MAX_LINE:
        return None
    whole, named = strip_wrapping(part), None
    if whole.upper() not in LETTERS[: len(choices)] and not whole.endswith("?"):
        words = strip_article(whole)
        exact = {index for index, choice in enumerate(choices) if strip_article(choice) == words}
        named = exact if len(exact) == 1 else None
    if named is None and head:
        named = _read_letter(text, head, rule, choices)
    if named is None:
        named = _read_texts(_first_sentence(text) if rule == "statement" else text, rule, choices)
    if named and len(named) == 1:
        return Answer(rule.removeprefix("first "), part, min(named))
    is_short = rule == "statement" and 0 < len(whole.split()) <= _MAX_WORDS
    if named is None and not (is_short or rule in ("box", "hashes", "json", "tag")):
        return None
    return Answer(rule, part, excluded="two answers" if named else "no option" if named is None else "a denial")


def _read_letter(text: str, head: re.Match[str], rule: str, choices: Sequence[str]) -> set[int] | None:
    """Return the options of a clause that begins with a letter; none if it takes them back, None if that is a word."""
    index, tail = LETTERS.index(head[1].upper()), text[head.end() :]
    own = choices[index] if index < len(choices) else ""
    body = _LABEL_END.sub("", tail)
    rest = _compile_choice(own).match(body) if own else None
    if rest is None and head[1] in "AI" and head.end(1) < len(text) and not re.match(_WORD_BEHIND, text[head.end(1) :]):
        return None
    if choices and index >= len(choices):
        return set()
    if rest is None and own and body:
        segment = re.split(r"[。;,\n]|[.](?!\d)|\s[-–—]\s|\s\(", body[:_MAX_REACH])[0]
        same = _find_same(segment, choices) or _find_same(body[:_MAX_REACH], choices)
        if same and index not in same:
            return same | {index}
        if not same and is_value(segment) and is_value(own):
            return set()
    tail = body[rest.end() :] if rest else tail
    if tail and (_WITHDRAWN.match(tail) or match("bounds", tail.lstrip())):
        return set()
    end = _SENTENCE_END.search(tail)
    first = cut_reason(f"x {tail[: end.start()] if end else tail}")[2:]
    others = _OTHER_LETTER.findall(first)
    further = tail[end.end() :] if end else ""
    if also := _ALSO.match(further) or (_ITEM.match(further) if rule in ("tag", "box", "json") else None):
        others.append(also[1])
    named = {index, *(LETTERS.index(letter.upper()) for letter in others)}
    if search("joins", first[:40]) or re.match(r"\s*(?:and|&|/|和)\s", first):
        named |= {place for _, _, place in _find_texts(first, choices)} or {index, -1}
    is_stopped = _STOP_BEHIND.match(text, head.end()) or text[head.end() - 1] in ")].:"
    return None if rest is None and "line" in rule and not is_stopped and len(named) == 1 else named


def _read_texts(text: str, rule: str, choices: Sequence[str]) -> set[int] | None:
    """Return the options that a clause names by words or a letter in it; none if it denies, None if it names none."""
    polarities = [POLARITY.get(normalise(choice)) for choice in choices]
    if choices and all(polarities) and (said := find_polarity(text)):
        is_one = len(said) == 1 and said <= {*polarities} and not search("refuses", text)
        return {polarities.index(min(said))} if is_one else set()
    if search("supposes", text):
        return set()
    head = behind("so", cut_reason(text))
    texts = _find_texts(head, choices)
    if "line" in rule:
        same = _find_same(re.split(r"\s[-–—]\s|: |\. |\s\((?!or\b|alternatively|maybe|或|也)", head)[0], choices)
        others = {index for piece in re.split("[,;、]", text[:_MAX_REACH])[1:] for index in _find_same(piece, choices)}
        return same | others | {index for *_, index in texts} if same else None
    stated = behind("verbs", head)
    verb = len(head) - len(stated)
    if len({index for start, end, index in texts if start >= verb and not _is_denied(head, start, end)}) > 1:
        return {index for *_, index in texts}
    places = [place for place in texts if rule != "sentence" or _TEXT_END.match(head, place[1])]
    letters = [(*m.span(1), LETTERS.index(m[1].upper())) for m in _NAMED_LETTER.finditer(head)]
    last = _HEAD.fullmatch(cut_fillers(stated).rstrip(STOPS + " "))
    if last and not letters and (rule != "sentence" or verb or "选" in head):
        letters = [(head.rfind(last[1]), len(head), LETTERS.index(last[1].upper()))]
    places = sorted(places + [place for place in letters if place[2] < (len(choices) or len(LETTERS))])
    if not places:
        return None if not may_be_value(text) or why_no_value(text) else _find_same(text, choices) or None
    places = [place for place in places if place[0] >= verb] or places
    named = {index for start, end, index in places if not _is_denied(head, start, end)}
    rest = "x".join(head[end:start] for (_, end, _), (start, _, _) in pairwise([(0, 0, 0), *places, (len(head), 0, 0)]))
    if not named or search("refuses", rest):
        return set()
    named |= {
        index
        for piece in [*re.split("[,;、x]", rest), text[len(cut_reason(text)) :].strip(" ,;")]
        for index in _find_same(piece, choices)
    }
    is_joined = re.search(r"x[)*\s]*(?:[/&|;、]|or\b|and\b|或|和)\s*\S|(?:[/&|;、]|\b(?:and|or)|或|和) ?[(*]*x", rest)
    return named | ({-1} if is_joined else set())


def _is_denied(text: str, start: int, end: int) -> bool:
    """Whether the clause of an option denies it, or compares something with it."""
    before = re.split(r"[,;:。]", text[max(0, start - 40) : start])[-1]
    is_denied = search("denies", before) or search("bounds", behind("verbs", before))
    return bool(is_denied or _WITHDRAWN.match(text, end) or match("bounds", text[end:].lstrip(")* ")))


def _find_same(text: str, choices: Sequence[str]) -> set[int]:
    """Return the options that are the same answer as `text`: the same text, else the same value."""
    words = strip_article(text)
    same = {index for index, choice in enumerate(choices) if strip_article(choice) == words}
    values = (
        []
        if same or not may_be_value(text)
        else [index for index, choice in enumerate(choices) if not _words_of(choice)]
    )
    return same or {index for index in values if is_same_open_answer(choices[index], text.strip(MARKS))}


@lru_cache(4096)
def _words_of(choice: str) -> str:
    """Return the words that each statement of an option has; none for numbers, formulas, yes and no."""
    words = strip_article(choice)
    has_one_form = words.replace(" ", "").isalpha() and words not in POLARITY and not read_quantity(words)
    return words if has_one_form else ""


def _find_texts(text: str, choices: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return start, end and index of the options' words, the longest ones; numbers and formulas have none."""
    places = [
        (*place.span(), index)
        for index, choice in enumerate(choices)
        if re.search(r"[^\W\d_]{2}|[\u4e00-\u9fff]", choice) and read_quantity(choice) is None and "\\" not in choice
        for place in _compile_choice(choice).finditer(text)
    ]
    return [p for p in places if not any(o[0] <= p[0] and p[1] <= o[1] and o[1] - o[0] > p[1] - p[0] for o in places)]


@lru_cache(4096)
def _compile_choice(choice: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, _LATEX.sub(r"\1", to_half_width(strip_wrapping(choice))).split()))
    return re.compile(rf"(?<![A-Za-z0-9])(?<!\w-){words or '(?!)'}(?![A-Za-z0-9]|[.,]\d)", re.IGNORECASE)


def _read_open(part: str, rule: str) -> Answer | None:
    """Return the open answer that a part states, or None. A line counts if it is short, or says Yes or No."""
    part = _first_sentence(part) if rule == "statement" else part
    part = _BULLETS.sub("", strip_wrapping(part) if rule in ("box", "tag") else part)
    if read_quantity(strip_wrapping(part)):
        return Answer(rule.removeprefix("first "), part, value=part)
    is_long = len(part.split()) > _MAX_WORDS or len(part) > _MAX_LINE
    if rule == "confirmation" or not strip_wrapping(part):
        return None
    if "line" in rule and not find_polarity(part) and (is_long or rule != "line"):
        return None
    return Answer(rule.removeprefix("first "), part, value=part, excluded=why_no_value(part))


def _first_sentence(text: str) -> str:
    """Return the first sentence of `text`, with those behind it that join another answer."""
    for end in _SENTENCE_END.finditer(text):
        behind = text[end.end() :].lstrip(MARKS)
        if not (match("joins", behind) or read_quantity(strip_wrapping(_SENTENCE_END.split(behind)[0]))):
            return text[: end.end()]
    return text


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
        solution = re.sub(r"(?i)^.*<answer>|</answer>.*", "", solution, flags=re.DOTALL).strip()
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
    rule, part = next(_find_explicit(to_half_width(text)), ("", ""))
    if rule in ("box", "hashes", "statement") and strip_wrapping(part):
        text = strip_wrapping(cut_reason(_first_sentence(part) if rule == "statement" else part))
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
