"""Extract the answer that a text states, and compare it with the reference answer of a row.

In this order: the text of a completion, the parts of it that may state an answer, options of multiple choice, open
answers, the reference answer of a row. The rules are `Stated answer` in definitions.md; `statements.toml` has the words
of each language, and `equality.py` compares open answers.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from numbers import Real
from typing import Any

from vgr_trl.rewards.equality import (
    ARTICLES,
    MARKS,
    POLARITY,
    STOPS,
    TABLES,
    compile_words,
    fold,
    is_same_open_answer,
    normalise,
    strip_article,
    strip_wrapping,
    to_half_width,
)
from vgr_trl.utils import RewardError


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


def _message_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content or ())


def excerpt(value: Any) -> str:
    """Return a value as text of at most 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_STATES, _CONFIRMS, _UNLESS, _OPENERS = map(compile_words, ("states", "confirms", "unless", "openers"))
_REASONS, _JOINS, _DENIES, _VERBS = map(compile_words, ("reasons", "joins", "denies", "verbs"))
_OPTION_WORD, _REFERS, _PLACES, _PRONOUNS = map(compile_words, ("option", "refers", "places", "pronouns"))

_ANCHORS = [anchor for table in TABLES.values() for anchor in table["anchors"]]
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.IGNORECASE | re.ASCII | re.DOTALL)
_THOUGHT_END = re.compile("</think>", re.IGNORECASE | re.ASCII)
_ANSWER_START, _ANSWER_END = (re.compile(tag, re.IGNORECASE | re.ASCII) for tag in ("<answer>", "</answer>"))
_BOX = re.compile(r"\\boxed\s{0,9}\{|<\|begin_of_box\|>")
_BOX_SEPARATOR = re.compile(
    r"(?:\}|<\|end_of_box\|>)[\s$.,;/&、()\\\[\]]{0,9}(?:or|and|或者?|和)?[\s$(\\\[\]]{0,9}", re.IGNORECASE
)
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u274c\ufe0f]")
_SENTENCE_END = re.compile(r"[.!?](?=[*\"')]{0,3}(?:\s|$))|[。\n]")
_BULLETS = re.compile(r"^(?:-[\s*_`\"']+)+")  # not the sign of -5
_BEFORE_CLAUSE = re.compile(r"(?:[\s:*_`>\"'“]|-(?=\s))*(?:(?:\\[\[(]|\$\$?)\s*\n\s*)?")
_ITEM = re.compile(r"[\s*>-]*(?:option\s)?\(?([A-J])\*{0,2}(?:[).:、]|[\s*]*$)", re.IGNORECASE)
_HASHES = re.compile(r"####\s*([^\n#]+)\s*$")
_MAX_REACH, _MAX_STATEMENTS = 300, 20  # characters read on each side of a statement; statements read, the last ones
_MAX_PART_LENGTH = 2000  # characters
_MAX_LINE_LENGTH, _MAX_LINE_WORDS = 80, 8  # of a line that states an open answer


@dataclass(frozen=True)
class Stated:
    """The answer that a text states.

    Attributes:
        rule: form of the statement: `tag`, `box`, `hashes`, `statement`, `confirmation`, `line` or `sentence`.
        part: text that states the answer.
        readings: 0-based index of the option, or possible texts of an open answer. Empty if two answers are named, or
            the tag has none.
    """

    rule: str
    part: str
    readings: tuple[Any, ...]


def stated_answer(text: str, choices: Sequence[str] = (), *, is_open: bool = False) -> Stated | None:
    """Return the answer that `text` states, None if it states none (`Stated answer` in definitions.md).

    Args:
        text: a completion, or a reference answer.
        choices: texts of the options; empty: options are known by letter only.
        is_open: whether the question is open.
    """
    text = _EMOJI.sub("", to_half_width(strip_thought(text)))
    tagged = answer_tag(text)
    for rule, part in _find_parts(text if tagged is None else tagged, tagged is not None):
        part = part[:_MAX_PART_LENGTH]
        readings = _read_open(part, rule) if is_open else _read_option(part, rule, choices)
        if readings is not None:
            return Stated(rule, part.strip(), readings) if tagged is None else Stated("tag", tagged.strip(), readings)
    return None if tagged is None else Stated("tag", tagged.strip(), ())


def strip_thought(text: str) -> str:
    """Return `text` without the content of `<think>`.

    Text before an unopened `</think>` is thought too, since chat templates often put `<think>` in the prompt; so is
    text after an unclosed `<think>`.
    """
    return _THOUGHT_END.split(_THOUGHT.sub("\n", text))[-1]


def answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>` of `text`, or None."""
    pieces = [_ANSWER_END.split(piece, maxsplit=1) for piece in _ANSWER_START.split(text)[1:]]
    return next((piece[0] for piece in reversed(pieces) if len(piece) > 1), None)


def _find_parts(text: str, in_tag: bool) -> Iterator[tuple[str, str]]:
    """Yield (rule, part of the text that may state the answer) in order of precedence."""
    if (box := _last_box(text)) is not None:
        yield "box", box
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    while len(lines) > 1 and _REASONS.match(lines[-1].lstrip(MARKS)):
        lines.pop()
    if lines and (hashes := _HASHES.search(lines[-1])):
        yield "hashes", hashes[1]
    yield from islice(_find_statements(text), _MAX_STATEMENTS)
    if in_tag:
        yield "tag", text
    if lines and not in_tag:
        if not _are_items(lines[-2:]):
            yield "line", lines[-1]
        if len(lines) > 1 and not _are_items(lines[:2]) and not lines[0].rstrip(MARKS).endswith(":"):
            yield "line", lines[0]
    sentences = _split_sentences(lines[-1]) if lines else []
    for sentence in sentences:
        if sentence is sentences[-1] or not _is_explanation(sentence):
            yield "sentence", sentence


def _are_items(lines: Sequence[str]) -> bool:
    """Whether two lines are adjacent items of an option list, or different letters."""
    first, second = _ITEM.match(lines[0]), _ITEM.match(lines[-1])
    if not (first and second):
        return False
    step = ord(second[1].upper()) - ord(first[1].upper())
    return step == 1 or (step != 0 and strip_wrapping(lines[0]) == first[1])


def _last_box(text: str) -> str | None:
    """Return the content of the last box, or of the last two if only `or` separates them."""
    boxes = list(_BOX.finditer(text))[-2:]
    contents = [
        text[box.end() :].partition("<|end_of_box|>")[0] if box[0][0] == "<" else _read_braces(text[box.end() :])
        for box in boxes
    ]
    if len(boxes) == 2:
        between = text[boxes[0].end() + len(contents[0]) : boxes[1].start()]
        if _BOX_SEPARATOR.fullmatch(between) and contents[0] != contents[1]:
            return " or ".join(contents)
    return contents[-1] if contents else None


def _read_braces(text: str) -> str:
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return ""


def _find_statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield the clauses after statement words and before confirmations, last one first."""
    for line in reversed(list(re.finditer(r".+", text))):
        start, end = line.span()
        lowered = line[0].lower()
        if not any(anchor in lowered for anchor in _ANCHORS):
            continue
        found = [(match.end(), "statement", match) for match in _STATES.finditer(text, start, end)]
        found += [(match.start(), "confirmation", match) for match in _CONFIRMS.finditer(text, start, end)]
        for _, rule, match in sorted(found, key=lambda each: each[0], reverse=True):
            before = _SENTENCE_END.split(text[max(start, match.start() - _MAX_REACH) : match.start()])[-1]
            if _UNLESS.search(before):
                continue
            if rule == "statement":
                yield rule, _first_clause(text[match.end() : match.end() + _MAX_REACH])
            elif before.strip():
                yield rule, before


def _first_clause(text: str) -> str:
    """Return the first sentence of `text`, on the next line if this one is empty."""
    line, _, further = text[_BEFORE_CLAUSE.match(text).end() :].partition("\n")  # type: ignore[union-attr]
    for end in _SENTENCE_END.finditer(line):
        behind = line[end.end() :].lstrip(MARKS)
        if not (_JOINS.match(behind) or behind[:1].isdigit()):  # "A. Or B."
            return line[: end.start()]
    following = further.lstrip().partition("\n")[0].rstrip(MARKS + STOPS + ")")
    return f"{line}; {following}" if _ITEM.fullmatch(following) or _JOINS.match(following) else line


def _split_sentences(line: str) -> list[str]:
    """Split a line into sentences, last one first."""
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(line)), len(line)]
    found = [line[start:end] for start, end in pairwise(ends)]
    return [sentence for sentence in found if strip_wrapping(sentence)][: -_MAX_STATEMENTS - 1 : -1]


def _is_explanation(sentence: str) -> bool:
    """Whether a sentence explains the preceding answer without stating one, such as `It has three valves.`"""
    start = sentence.lstrip(MARKS)
    return bool(_PRONOUNS.match(start)) and not _OPENERS.match(start)


def _cut_openers(text: str) -> str:
    """Remove words before the answer of a clause."""
    for _ in range(5):
        text = _BULLETS.sub("", text.lstrip(MARKS + ":,—≈~=#>"))
        match = _OPENERS.match(text)
        if match is None or not strip_wrapping(text[match.end() :]):
            break
        text = text[match.end() :]
    return text


def _cut_reason(text: str) -> str:
    """Remove the reason after the answer of a clause."""
    for match in re.finditer(r"[\s,;:(。]+", text):
        if _REASONS.match(text, match.end()):
            return text[: match.start()]
    return text


LETTERS = "ABCDEFGHIJ"

_LETTER = re.compile(
    r"[(\[]\s?(?P<bracketed>[A-Ja-j])\s?[)\]]"
    r"|(?<![A-Za-z0-9_'’^\\=(])(?P<plain>[A-J])(?![A-Za-z0-9_'’^+]|\s?=|[\u4e00-\u9fff](?<![选選項项是为正因和或对不错]))"
)
_SMALL_LETTER = re.compile(r"\(?\s?([a-j])\s?(?:[).:]|$)")
_FOLLOWED_BY_WORD = re.compile(r"\s+(?!(?:or|and|nor|is|are|was|because|since|as|with|which)\b)[a-z]{2}|\s+[a-z]\b")
_IS = re.compile(
    r"[\s)\]*_\"'”]{0,4}(?:选项|項|项)?(?:(?:is|was|are|were|would be)\s)?(?:(?:also|clearly|definitely)\s)?"
)
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}|\\[()\[\]]|\$")
_CLAUSE_END = re.compile(r"[)\]*_`\"'”]{0,4}(?:\s*[.:)、。,;(!]|\s+[-–—]\s|\s*$|\s*(?:因为|because\b|since\b|选项))")


def _read_option(part: str, rule: str, choices: Sequence[str]) -> tuple[int, ...] | None:
    """Return the option that a part names; () if it names two, None if it names none.

    What follows a reason (`B because A is red`) counts only if nothing stands before it. A line, a box and a tag have
    to begin with the option, and on a line no word of a sentence may follow. A sentence counts by an option's text.
    """
    alike = [index for index, choice in enumerate(choices) if strip_article(choice) == strip_article(part)]
    if alike and len(strip_wrapping(part)) > 1:
        return tuple(alike) if len(alike) == 1 else ()
    if rule == "confirmation":
        last = part.rpartition(",")[2]
        found = _find_named_options(last, choices) or _find_named_options(part, choices)
    elif rule == "sentence":
        part = _LATEX.sub(r"\1", part)
        found = [one for one in _find_named_options(part, choices, letters=False) if _is_clause_end(part[one[1] :])]
    else:
        part = _LATEX.sub(r"\1", _cut_openers(part if rule == "statement" else strip_wrapping(part)))
        found = _find_named_options(part, choices)
        if found and rule != "statement":
            start, end, index = found[0]
            if part[:start].strip(MARKS + "([{"):
                return None
            is_alone = _CLAUSE_END.match(part, end) or _starts_with_choice(part[end:], choices[index : index + 1])
            if rule == "line" and not is_alone:
                return None
        head = len(_cut_reason(part))
        found = [one for one in found if one[0] < head] or found
        if found and _has_other_choice(part[found[0][1] :], choices, found[0][2]):
            return ()
    named = {index for _, _, index in found}
    return tuple(named) if len(named) == 1 else () if named else None


def _find_named_options(text: str, choices: Sequence[str], *, letters: bool = True) -> list[tuple[int, int, int]]:
    """Return (start, end, index) of options that a clause names, by letter or else by text, and does not deny."""
    found, number = [], len(choices) or len(LETTERS)
    for match in _LETTER.finditer(text) if letters else ():
        before = text[max(0, match.start() - 40) : match.start()]
        letter = match["bracketed"] or match["plain"]
        is_word = match["plain"] and letter in "AI" and _FOLLOWED_BY_WORD.match(text, match.end())
        index, is_place = LETTERS.index(letter.upper()), match["bracketed"] and _REFERS.search(before)
        if index < number and not is_place and not (is_word and not _OPTION_WORD.search(before)):
            found.append((match.start(), match.end(), index))
    small = _SMALL_LETTER.match(text) if letters and not found else None
    if small is not None and (index := LETTERS.index(small[1].upper())) < number:
        found = [(0, small.end(), index)]
    if not found:
        matches = [(index, _compile_choice(choice).finditer(text)) for index, choice in enumerate(choices)]
        places = [(match.start(), match.end(), index) for index, found_matches in matches for match in found_matches]
        found = sorted(one for one in places if not any(_is_within(one, other) for other in places))
    return [one for one in found if not _is_denied(text, *one[:2])]


def _is_clause_end(behind: str) -> bool:
    """Whether a clause ends before `behind`, or continues in ideographs, which have no spaces."""
    return bool(_CLAUSE_END.match(behind) or _PLACES.match(behind) or re.match(r"[\u4e00-\u9fff]", behind))


def _is_within(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1] and one[1] - one[0] < other[1] - other[0]


def _is_denied(text: str, start: int, end: int) -> bool:
    before = re.split(r"[,;:。]", text[max(0, start - 40) : start])[-1]
    return bool(_DENIES.search(before) or _DENIES.match(text, _IS.match(text, end).end()))  # type: ignore[union-attr]


@lru_cache(maxsize=4096)
def _compile_choice(choice: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, _LATEX.sub(r"\1", to_half_width(strip_wrapping(choice))).split()))
    return re.compile(rf"(?<![A-Za-z0-9]){words or '(?!)'}(?![A-Za-z0-9]|[.,]\d)", re.IGNORECASE)


def _starts_with_choice(text: str, choices: Sequence[str]) -> bool:
    text = text.lstrip(MARKS + STOPS + ")](-–—")
    article = ARTICLES.match(text)
    rest = text[article.end() :].lstrip() if article else text
    return any(_compile_choice(choice).match(each) for choice in choices for each in (text, rest))


def _has_other_choice(behind: str, choices: Sequence[str], index: int) -> bool:
    """Whether an option is followed by exactly the text of another option (`B. red`)."""
    segment = re.split(r"[.。;\n]|\s[-–—]\s", behind.lstrip(MARKS + STOPS + ")]("))[0]
    if _starts_with_choice(segment, choices[index : index + 1]):
        return False
    pieces = {strip_article(piece) for piece in (segment, segment.partition(",")[0], segment.strip("() "))}
    return any(strip_article(choice) in pieces for choice in choices)


def _read_open(part: str, rule: str) -> tuple[str, ...] | None:
    """Return possible open answers that a part states, or None.

    A short line counts as a whole, a sentence by its end or its emphasised words.
    """
    if not strip_wrapping(part):
        return None
    if rule in ("box", "hashes") or (rule == "tag" and not _VERBS.search(part)):
        return (strip_wrapping(part),)
    if rule == "confirmation":
        return (strip_wrapping(_cut_openers(part.rpartition(",")[2])),)
    opened, stripped = _cut_openers(part), strip_wrapping(part)
    short = len(stripped.split()) <= _MAX_LINE_WORDS and len(stripped) <= _MAX_LINE_LENGTH
    if rule == "statement":
        clauses = [] if _DENIES.match(opened) else [part, opened]
        if clauses and not re.search(r"[,;、/]", part):
            clauses += _find_endings(part)
    elif rule in ("line", "tag"):
        clauses = [part, opened, *_find_endings(_split_sentences(part)[0])] if short else []
    else:
        clauses = _find_endings(part)
    pieces = re.split(r"[,.;:。]|\s[-–—]\s", part) if rule != "statement" else ()
    words = [POLARITY.get(strip_article(each)) or POLARITY.get(strip_article(_cut_openers(each))) for each in pieces]
    if {"yes", "no"}.issubset(words):
        return ()
    clauses += filter(None, words)
    clauses += [_cut_reason(clause) for clause in clauses]
    clauses += [clause[: place.start()] for clause in clauses if (place := _PLACES.search(clause))]
    return tuple(dict.fromkeys(filter(None, map(strip_wrapping, clauses)))) or None


_EMPHASISED = re.compile(r"\*\*(.+?)\*\*|\\\((.+?)\\\)|\$([^$]+)\$|[“「\"](.+?)[”」\"]")
_TOKEN = re.compile(r"(?:(?<=\s)|^|(?<=[\u4e00-\u9fff]))\S")


def _find_endings(sentence: str) -> list[str]:
    """Return possible answers at the end of a sentence: emphasised words, last words, text after `=`."""
    if _DENIES.search(sentence):
        return []
    emphasised = [next(filter(None, match.groups())) for match in _EMPHASISED.finditer(sentence)]
    found = emphasised[:1] if len(set(emphasised)) == 1 else []
    opened = _cut_openers(sentence)
    if opened != sentence.lstrip(MARKS):  # "There are two dogs in the picture, one of them brown."
        found += re.split(r"[,;](?:\s|$)", opened)[:1]
    clause = strip_wrapping(_cut_reason(opened))
    found += [clause[verb.end() :] for verb in list(_VERBS.finditer(clause))[-1:]]
    found += clause.partition(":")[2:]
    *others, clause = re.split(r"[,;](?:\s|(?=[\u4e00-\u9fff]))|:", clause)
    if others:
        are_numbers = re.match(r"\W*\d", clause) and re.search(r"\d", others[-1])
        if are_numbers or all(re.fullmatch(r"[!-~]+", strip_wrapping(each)) for each in (others[-1], clause)):
            return found  # the last part of a list
    for token in list(_TOKEN.finditer(clause))[: -_MAX_LINE_WORDS - 1 : -1]:
        before = clause[: token.start()].rstrip()
        if _JOINS.search(before, max(0, len(before) - 9)):
            break
        if not (token[0].isdigit() and re.search(r"\d", before)):
            found.append(clause[token.start() :])
    return found + [text.rpartition("=")[2] for text in (emphasised[-1:] or [clause]) if "=" in text]


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


def _resolve_open(text: str) -> Solution:
    found = stated_answer(text, is_open=True)
    if found is not None and found.rule in ("box", "hashes", "statement") and strip_wrapping(found.part):
        text = strip_wrapping(_cut_reason(found.part))
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


def _find_choice(solution: str, options: tuple[str, ...]) -> int:
    """Return the option that a solution names, by letter, text or a statement; -1 if it names none."""
    by_letter = _read_option(to_half_width(solution), "tag", options) or ()
    exact = [i for i, option in enumerate(options) if to_half_width(option).strip() == to_half_width(solution).strip()]
    meant = sorted({*by_letter, *exact})
    meant = meant or [i for i, option in enumerate(options) if normalise(option) == normalise(solution)]
    if not meant and (stated := stated_answer(solution, options)) is not None:
        meant = list(stated.readings)
    if len(meant) > 1:
        names = " or ".join(f"{LETTERS[index]} ({excerpt(options[index])})" for index in meant)
        raise RewardError(f"solution is {excerpt(solution)}, which could mean {names}: give the index of the option")
    return meant[0] if meant else -1


def states_answer(text: str, solution: Solution) -> bool:
    """Return whether a completion states any answer, right or wrong, of the kind of `solution`."""
    stated = stated_answer(text, solution.choices, is_open=solution.index is None)
    return stated is not None and bool(stated.readings)


def is_right(text: str, solution: Solution) -> bool:
    """Return whether a completion states `solution` or another accepted answer."""
    for gold in (solution, *solution.others):
        stated = stated_answer(text, gold.choices, is_open=gold.index is None)
        for reading in stated.readings if stated else ():
            if reading == gold.index or (gold.index is None and is_same_open_answer(gold.text, reading)):
                return True
    return False
