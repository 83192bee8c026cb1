"""Read the one answer that a text states, and compare it with the reference answer of a row.

The order of strength (docs/answers.md): the last explicit statement; else a line that is only an answer; else the last
sentence. A text is read without the reference. `phrases.py` reads clauses, and `equality.py` compares open answers.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from numbers import Real
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.equality import is_same_open_answer, is_value
from vgr_trl.rewards.phrases import (
    MARKS,
    POLARITY,
    behind_verb,
    bracket_depths,
    cut_fillers,
    cut_reason,
    find_polarity,
    fold,
    has,
    may_be_value,
    normalise,
    read_quantity,
    refuses,
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
    """Decode completions; of the special tokens, keep only tags.

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
_REACH, _MAX_PLACES = 300, 100  # characters of a statement; places that are looked at, from the end
_MAX_LINE, _MAX_WORDS = 80, 8  # characters and words of a line that is an open answer

_THINK = r"[<◁\[](?:{0}(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)[>▷\]]|\|{1}_of_thought\|>)"
_THOUGHT_END = re.compile(_THINK.format("/", "end"), re.IGNORECASE)
_THOUGHT = re.compile(rf"{_THINK.format('', 'begin')}.*?(?:{_THOUGHT_END.pattern}|\Z)", re.IGNORECASE | re.DOTALL)
# A special token, not of a box
_TOKEN = re.compile(
    r"<(?:\|(?!(?:begin|end)_of_box)[^<>|\s]{1,30}\|>(?:assistant\b)?|(?:/?s|eos|pad|unk|end_of_\w{4,9})>)"
)
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u2714\ufe0f]")

# Words at which explicit statements are sought; then their forms, matched in lower case.
_ANCHORS = """\\boxed <|begin_of_box <answer <final <conclusion #### box point_2d answer correct right best option
choice choose pick select respuesta opción antwort resposta risposta réponse ответ 答 选 選 正 结 回答 답
الإجابة""".split()
_ANCHORS += ["go with", "my final", "my answer", "the final", "the answer"]
_MARKS, _A_TO_J = r"['\"*_]{0,4}", r"[(\"'“*]{0,4}[a-j](?![a-z])"
_STATEMENT = re.compile(
    r"(?ma)(?P<box>\\boxed\s{0,9}\{|<\|begin_of_box\|>)|(?P<tag><(?:final_?)?(?:answer|conclusion)>)|(?P<hashes>####)"
    r"|(?P<statement>(?<![a-z])(?:answer|option|choice)s?(?: letter| number)?(?: (?:to|for|of|in|among|here|that)\b"
    rf"[^.\n:;?!]{{0,80}}?)?{_MARKS},? (?:is|are|was|should be|must be|will be|becomes)\b(?!n['’]t)"
    rf"|(?:answer|(?<=correct )option|choice|box(?:_2d)?|point_2d){_MARKS} ?(?::|=>?|->|→|- )"
    rf"|(?:(?<=\bto )option|(?<![a-z])(?:choose|pick|select)|(?:(?<=i['’]d )|(?<=i['’]ll )|(?<=let['’]s ))go with)"
    rf"(?= (?:option |choice |answer )?{_A_TO_J})"
    rf"|(?:答案|结果|结论|(?<![^\s。,;【\[])答|正[确確]的?(?:选项|選項|选择|描述|说法))[】\]]?{_MARKS}"
    r"(?:应该?|應|就|只能|最终){0,2}(?:选择?|選|是|为|為|: ?|】|\])"
    rf"|[选選](?:择|擇|为|為|答案)? {{0,3}}:? {{0,3}}(?={_A_TO_J})"
    r"|(?:respuesta|opci[oó]n|antwort|r[ée]ponse|resposta|risposta|ответ|正解|回答|정답|답|الإجابة)"
    rf"(?: (?:corr\w+|finale?|الصحيحة))?{_MARKS} ?(?::|- |(?:es|lautet|ist|est|é|è)(?![a-z])(?: la?)?|は|은|هي))"
    r"|(?P<confirmation>(?<![a-z])(?:correct|right|best|(?:my|the) (?:final )?answer(?! (?!because|since)[a-z]))\b"
    r"(?: (?:answer|option)\b)?(?!,? (?:and so|as) (?:is|are)\b|\?| (?:only )?(?:if|when|is|to)\b"
    r"| [a-z]+ (?:is|are|was)\b|:)|正[确確]的?(?:答案|选项)?)"
)
_IS = re.compile(r" (?:is|are|must be|should be|seems|as)(?: (?:\w+ly|the|indeed|also|most|only))* \Z")
_MARK_END = re.compile(r"</?(?:final_?)?(?:answer|conclusion)>?|<\|end_of_box\|>", re.IGNORECASE)
_JOINED = re.compile(
    r"(?i)(?:[/&|;、]|\b(?:and|or|[a-j]\W? to)|或者?|和|到)(?: also)?(?: the)?[\s$(\\\[\]*]*\Z|\}[\s$.,()}\\\[\]]*\Z"
)
_JOINS = re.compile(r"(?i)[)*\s]*(?:[/&|;、]|or\b|and\b|to \W?[a-j]\b|或|和|到)\s*\S?")
_SENTENCE_END = re.compile(
    r"[.!?](?<!\b(?:vs|Mr|Ms|Dr|St).)(?<![ .][K-Z].)(?=[*\"')]{0,3}(?:\s|$))(?![*)]{0,2}[\"'][*)]{0,2} [a-z])|[。\n]"
)
_COURTESY = re.compile(  # from its start to the end of its line
    r"(?im)[\n.!?。]\s*(?:(?:i )?hope |let me know|feel free|please |if you |is there any|do you |would you |thank"
    r"|happy to|glad to|希望|如(?:果|有).{0,12}(?:疑问|问题|需要|帮助)|请(?:随时|告诉我)).*$"
)
_COMMENT = re.compile(r"(?i)(?:its?|they|their|he|she|his|her|this|these|that|those|you)\b|[它其这该]")

_ITEM = re.compile(r"[\s*>-]*(?:[Oo]ption\s)?\(?([A-Ja-j])(?:\*{0,2}[).:、]|\*\*|[\s*]*$)")
_LETTER = (
    r"(?<![A-Za-z0-9_'’^\\=])(?:[A-J](?![A-Za-z0-9_'’^+]|\s?=)"
    r"(?![\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3](?<![选選项項是为正因和或对不错也で입]))|(?<=[(\[])[a-j](?=\s?[)\]]))"
)
_HEAD = re.compile(rf"(?:-\s)?[\s*_`\"'“$(\[{{]*({_LETTER}|[a-j](?=[*_`\s]*(?:[).:。]|\Z)))[\s*_`\"'”)\]}}$]*")
_NAMED = re.compile(rf"(?:(?<![A-Za-z0-9])[(\[]\s?|\b(?:[Oo]ption|[Cc]hoice|[Ll]etter)\s[(\"'*]*|选项\s?)({_LETTER})")
_NO_WORD = r"(?!\s+(?!(?:or|and|nor|is|are|was|because|since|as|which|with|but|then|here)\b)[A-Za-z]{2}|\s+[a-z]\b)"
_OTHER = re.compile(rf"{_LETTER}(?:(?<![AI])|{_NO_WORD})")
_TAKEN_BACK = re.compile(
    rf"\. No,|[.,;!?]\s*(?i:(?:no,|no,? wait|wait|sorry|actually),? (?:i mean |it is )?)[(*]*{_OTHER.pattern}"
)
_LABEL_END = re.compile(r"(?:[)\]\s*_`.:;,。、]|(?<![.:] )[-–—]\s|\\[ ,;!]|~)+")
_STOP_BEHIND = re.compile(r"\s*(?:[.:)、。,;(!-]|\Z|because\b|since\b|因为|选项|项)")
# A sentence that adds another answer to the one before
_MORE = re.compile(
    rf"(?i:or|alternatively|maybe|also)\b|[或也]|[(*]*(?:Option )?{_LETTER}[\s)*]*(?:[.!。,;]|\Z|也|is poss)"
)
_TEXT_END = re.compile(  # of an option's text in a sentence; ideographs have no spaces
    r"[)\]*_`\"'”]{0,4}(?:\s*[.:)、。,;(!/]|\s+[-–—]\s|\s*$|\s+(?:or|and|in|on|at|with|for|from|of|as|[a-z]+ing)\b)|[\u4e00-\u9fff]"
)
_BULLET = re.compile(r"^-\s+(?!(?:sqrt|sin|cos|tan|log|ln|[a-z]{1,2}|[A-Z]+)?(?![^\W\d_]))|^-\s+(?=no\b|\d{4}-)")
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}|\\[()\[\]]|\$")


@dataclass(frozen=True)
class Answer:
    """The answer that a text states.

    Attributes:
        rule: form of the statement: `tag`, `box`, `hashes`, `statement`, `confirmation`, `line` or `sentence`.
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
    if any(sign in text for sign in "<[◁"):  # most long texts have no tags and tokens
        text = _TOKEN.sub("", _THOUGHT_END.split(_THOUGHT.sub("\n", text))[-1])
    text = text if text.isascii() else _EMOJI.sub("", text)
    for rule, part in chain(_find_explicit(text), _find_plain(text, choices)):
        answer = _read_open(part.strip(), rule) if is_open else _read_option(part.strip(), rule, choices)
        if answer is not None:
            return answer
    return None


def _find_explicit(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rule and the content of explicit statements, the last one first; a joined pair is one content."""
    lowered = text.lower()
    latin = lowered.encode("ascii", "ignore").decode()  # of Chinese texts little is left to search
    anchors = [anchor for anchor in _ANCHORS if anchor in (latin if anchor.isascii() else lowered)]
    places = {place.start() for anchor in anchors for place in re.finditer(re.escape(anchor), lowered)}
    later, rule, last = 0, "", ""  # the statement behind
    for start in sorted(places, reverse=True)[:_MAX_PLACES]:
        match = _STATEMENT.match(lowered, start)
        if match is None or not (part := _read_part(text, match)).strip():
            continue
        between = text[match.end() : later]
        is_joined = rule == match.lastgroup and rule in ("box", "statement") and last != part
        if is_joined and _JOINED.search(between[-40:]) and not _SENTENCE_END.search(between):
            part = f"{part} or {last}"
        elif rule:
            yield rule, last
        later, rule, last = start, str(match.lastgroup), part
    if rule:
        yield rule, last


def _read_part(text: str, match: re.Match[str]) -> str:
    """Return the content of an explicit statement; empty if it is none."""
    start, rest = match.start(), text[match.end() : match.end() + 2000]
    if match["hashes"]:
        return rest.partition("\n")[0]
    if match["tag"] or "|>" in match[0]:
        part = _MARK_END.split(rest, maxsplit=1)[0]
        lines = part.strip().splitlines()
        return part if match["box"] or len(lines) < 2 or _is_list(lines) else lines[-1]
    if match["box"]:
        depths = bracket_depths(re.sub("[^{}]", " ", rest))
        part = rest[: next((end for end, depth in enumerate(depths) if depth < 0), 0)]
        return "" if re.match(r"\W{0,9}(?:is|was) (?:not|wrong)\b", rest[len(part) :]) else part
    clause = re.split(r"[.!?;](?=\s)|[。\n]", text[max(0, start - _REACH) : start])[-1]
    before = re.split("[,;:]", clause)[-1][-25:]
    if has("supposes", clause) or has("denies", before) or has("others", before):
        return ""
    if match["statement"]:
        part = _read_line(_MARK_END.split(rest, maxsplit=1)[0])
        is_none = part.rstrip(MARKS).endswith("?") or has("supposes", _SENTENCE_END.split(part)[0])
        return "" if is_none or re.match(r"not\b(?!.*\bbut\b)", part) else part
    verb = _IS.search(clause.lower())
    return clause[: verb.start()] if verb else "" if match[0].isascii() else clause.rstrip("是为最")


def _read_line(rest: str) -> str:
    """Return the rest of a line, or the next line if it is empty; with the line behind if both are a list."""
    line, _, further = re.sub(r"^(?:\n\s*-(?=\s)|[\s:*_`\"'“]|\\[\[(]|\$\$?\s*\n)+", "", rest)[:_REACH].partition("\n")
    following = further.lstrip().partition("\n")[0]
    line = line if "{" in line else re.split(r"(?:\"|(?<=[\]\d]))\s*(?:,\s*\"|\})", line)[0]  # JSON
    return f"{line}; {following}" if _ITEM.fullmatch(following) or _MORE.match(following) else line


def _is_list(lines: Sequence[str]) -> bool:
    """Whether lines are nothing but several parts of a few words, or items."""
    is_short = all(len(re.sub(" [-+*/=] ", "", line).split()) < 3 for line in lines)
    return len({*lines}) > 1 and (is_short or all(map(_ITEM.match, lines[-2:])))


def _find_plain(text: str, choices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the last line, the first if it begins with a letter, and the last sentence; a list of lines has none."""
    lines = [line for line in _COURTESY.sub("", text[-_REACH:]).splitlines() if re.search(r"[^\W_]", line)]
    lines = [re.sub(r"^\s*-\s+", "", line) for line in lines]
    is_letter = lines and _ITEM.fullmatch(lines[-1]) and not any(map(_ITEM.fullmatch, lines[:-1]))  # behind a list
    is_listed = len({*map(strip_article, lines[-2:])} & {*map(strip_article, choices)}) > 1
    if not lines or is_listed or (not is_letter and _is_list(lines if len(text) < _REACH else lines[-2:])):
        return
    yield "line", lines[-1]
    if len(lines) > 1 and _ITEM.match(first := text.lstrip().partition("\n")[0]):  # B. Then an explanation
        yield "line", first
    ends = [0, *(end.end() for end in _SENTENCE_END.finditer(lines[-1])), len(lines[-1])]
    sentences = [part for start, end in pairwise(ends) if re.search(r"[^\W_]", part := lines[-1][start:end])]
    while len(sentences) > 1 and _COMMENT.match(sentences[-1].lstrip(MARKS)):
        sentences.pop()
    yield "sentence", sentences[-1]


def _read_option(part: str, rule: str, choices: Sequence[str]) -> Answer | None:
    """Return the option that a part names: as a whole, by its letter, or by its text."""
    text, whole = _LATEX.sub(r"\1", cut_fillers(part.strip(MARKS))), strip_wrapping(part)
    is_letter = whole.upper() in LETTERS[: len(choices)] or whole.endswith("?")
    named = None if is_letter else _find_same(whole, choices, exactly=True)
    if named is None or len(named) != 1:
        named = _name_options(text, rule, choices)
    if named and len(named) == 1:
        return Answer(rule, part, min(named))
    is_short = rule == "statement" and 0 < len(whole.split()) <= _MAX_WORDS
    if named is None and not (is_short or rule in ("box", "hashes", "tag")):
        return None
    return Answer(rule, part, excluded="two answers" if named else "no option" if named is None else "a denial")


def _name_options(text: str, rule: str, choices: Sequence[str]) -> set[int] | None:
    """Return the options that a clause names, -1 for others; none if it denies, None if it names none."""
    known = LETTERS[: len(choices) or len(LETTERS)]
    label = None if rule == "sentence" else _HEAD.match(text)
    if label and (label[1] not in "AI" or label.end(1) == len(text) or re.match(_NO_WORD, text[label.end(1) :])):
        named = _read_label(text[label.end() :], known.find(label[1].upper()), choices)
        if rule != "line" or len(named) > 1 or _STOP_BEHIND.match(text, label.end()) or text[label.end() - 1] in ")].:":
            return named
    polarities = [POLARITY.get(normalise(choice)) for choice in choices]
    if choices and all(polarities) and (said := find_polarity(text)):
        return {index for index, polarity in enumerate(polarities) if polarity in said and not refuses(text)}
    if rule == "line":
        return None
    head = cut_reason(_first_sentence(text) if rule == "statement" else text)
    verb = len(head) - len(behind_verb(head))
    texts = _find_texts(head, choices)
    ends = _TEXT_END if verb or not head.isascii() else _STOP_BEHIND
    places = [place for place in texts if rule != "sentence" or ends.match(head, place[1])]
    places = texts if places and not verb else places  # red blue
    places += [(*name.span(1), known.find(name[1].upper())) for name in _NAMED.finditer(head)]
    if not places:
        return None if why_no_value(text) else _find_same(text, choices) or None
    places = [place for place in places if place[0] >= verb] or places
    around = f"{head[: min(places)[0]]} {head[max(places)[1] :]}"
    if has("supposes", text) or refuses(around):
        return set()
    stated = [place for place in places if not _is_denied(head, *place[:2])]
    is_joined = any(_JOINED.search(head[:start]) or _JOINS.match(head, end) for start, end, _ in stated)
    pieces = re.split("[,;、\n]", head[verb:])
    listed = {index for piece in pieces if len(pieces) > 1 for index in _find_same(piece, choices)}
    return {index for *_, index in stated} | listed | ({-1} if is_joined else set())


def _read_label(body: str, index: int, choices: Sequence[str]) -> set[int]:
    """Return the options of a clause that begins with a letter; none if it takes the letter back."""
    if index < 0:
        return set()
    rest = body[label.end() :] if (label := _LABEL_END.match(body)) else body
    if own := _compile_choice(choices[index]).match(rest) if choices else None:
        body = rest[own.end() :]
    elif choices and rest:
        segment = re.split(r"[。;,\n]|[.](?!\d)|\s[-–—]\s|\s\(", rest[:_REACH].lstrip("(["))[0].rstrip(")] ")
        same = _find_same(segment, choices) or _find_same(rest[:_REACH], choices)
        if same - {index} or (not same and is_value(segment) and is_value(choices[index])):
            return {index, -1}
    first = cut_reason(f"x {_first_sentence(body)}")[2:]
    if _is_denied(first, 0, 0) or has("bounds", first[:9]) or first[:1] == "+" or _TAKEN_BACK.search(body):
        return set()
    is_joined = has("joins", first[:40]) or _JOINS.match(first)
    return {index, *(LETTERS.index(letter.upper()) for letter in _OTHER.findall(first))} | (
        {-1} if is_joined else set()
    )


def _is_denied(text: str, start: int, end: int) -> bool:
    """Whether the clause of an option denies it, or compares something with it."""
    before = re.split(r"[,;:。]", text[max(0, start - 40) : start])[-1]
    behind = re.split(r"[,;:。(]|\.\s|\s[-–—]\s", text[end : end + 40])[0]
    return has("denies", f"{before} {behind}") or has("bounds", behind_verb(before))


def _find_same(text: str, choices: Sequence[str], *, exactly: bool = False) -> set[int]:
    """Return the options with the same text as `text`, else those with the same value."""
    same = {index for index, choice in enumerate(choices) if strip_article(choice) == strip_article(text)}
    if same or exactly or not may_be_value(text):
        return same
    values = [index for index, choice in enumerate(choices) if may_be_value(choice)]
    return {index for index in values if is_same_open_answer(choices[index], text.strip(MARKS))}


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
    part = _BULLET.sub("", strip_wrapping(part) if rule in ("box", "tag") else part)
    whole, is_long = strip_wrapping(part), len(part.split()) > _MAX_WORDS or len(part) > _MAX_LINE
    if rule == "confirmation" or not whole or (rule == "line" and is_long and not find_polarity(part)):
        return None
    return Answer(rule, part, value=part, excluded=why_no_value(part))


def _first_sentence(text: str) -> str:
    """Return the first sentence of `text`, with those behind it that join another answer."""
    for end in _SENTENCE_END.finditer(text):
        behind = text[end.end() :].lstrip(MARKS)
        is_item = end[0] == "\n" and _ITEM.match(behind)
        if not (is_item or _MORE.match(behind) or read_quantity(strip_wrapping(_SENTENCE_END.split(behind)[0]))):
            return text[: end.end()]
    return text


_MAX_EXACT_NUMBER: Any = 1e18  # floats far below it are exact integers
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
            `\boxed{42}`. True and False are yes and no. A list of texts, also as JSON or in Python's notation, holds
            several answers of which each counts as right; a list of numbers is one answer. A string of digits is
            never an index.
        choices: texts of the 2 to 10 options in the order of their letters; None for an open question.
        label_idx: used if `solution` is None; a number is always a 0-based index.

    Raises:
        RewardError: the solution is missing, is none of the choices, is ambiguous, or is a long text without an answer;
            or the choices are not 2 to 10 different texts.
    """
    options = _parse_choices(choices)
    letters = tuple(LETTERS) if solution is None and not options and _is_number(label_idx) else ()
    solution = label_idx if solution is None else solution
    solution = to_python(solution)
    if isinstance(solution, str) and solution.startswith(('["', "['")):  # a list, as tables of texts have it
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError):
                solution = parse(solution)
    accepted = list(solution) if isinstance(solution, list | tuple) and solution else [solution]
    if len(accepted) > 1 and all(map(_is_number, accepted)):  # a box, a point, a vector
        accepted = [f"[{', '.join(map(_to_text, accepted))}]"]
    elif len(accepted) > 1 and not all(isinstance(text, str) for text in accepted):
        raise RewardError(f"solution is {excerpt(solution)}: give a list of texts, or one of numbers")
    first, *others = dict.fromkeys(_resolve_one(text, options or letters) for text in accepted)
    return replace(first, choices=options, others=tuple(others))


def usable_solution(row: Mapping[str, Any]) -> Solution | None:
    """Return the reference answer of a row with the columns of `resolve_solution`, or None if it is unusable."""
    try:
        return resolve_solution(row.get("solution"), row.get("choices"), row.get("label_idx"))
    except RewardError:
        return None


def _resolve_one(solution: Any, options: tuple[str, ...]) -> Solution:
    if isinstance(solution, bool):
        solution = "yes" if solution else "no"
    if isinstance(solution, str):
        solution = re.sub(r"(?i)^.*<answer>|</answer>.*", "", solution, flags=re.DOTALL).strip()
    if solution == "" or not (isinstance(solution, str) or _is_number(solution)):
        raise RewardError(f"solution is {excerpt(solution)}: give the right answer, a text or a number")
    if not options:
        return _resolve_open(_to_text(solution))
    index = int(solution) if _is_index(solution) else _find_choice(_to_text(solution), options)
    if index not in range(len(options)):
        accepted = f"a letter A to {LETTERS[len(options) - 1]}, an index 0 to {len(options) - 1}, or the text of one"
        raise RewardError(f"solution is {excerpt(solution)}, which names none of the choices, or two: give {accepted}")
    return Solution(options[index], options, index)


@lru_cache(4096)
def _resolve_open(text: str) -> Solution:
    rule, part = next(_find_explicit(to_half_width(text)), ("", ""))
    if rule in ("box", "hashes", "statement") and strip_wrapping(part):
        text = strip_wrapping(cut_reason(_first_sentence(part) if rule == "statement" else part))
    elif len(text.split()) > _MAX_GOLD_WORDS:
        raise RewardError(f"solution is {excerpt(text)}, which states no answer: give it alone, or in \\boxed{{}}")
    if not (letter := _GOLD_LETTER.fullmatch(strip_wrapping(to_half_width(text)))):
        return Solution(text)
    index = LETTERS.index((letter[1] or letter[2] or letter[3]).upper())
    return Solution(LETTERS[index], index=index)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, not a bool, that floats represent exactly."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(abs(value) < _MAX_EXACT_NUMBER)


def _is_index(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer()


def to_python(value: Any) -> Any:
    """Convert a NumPy or PyTorch value, which formatted data sets return, to Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(int(value) if _is_index(value) else value)


def _parse_choices(choices: Any) -> tuple[str, ...]:
    if choices is None:
        return ()
    choices = to_python(choices)
    if isinstance(choices, list | tuple) and 2 <= len(choices) <= len(LETTERS):
        texts = [_to_text(choice) if isinstance(choice, str) or _is_number(choice) else "" for choice in choices]
        if len({fold(text) for text in texts} - {""}) == len(texts):
            return tuple(texts)
    differing = "2 to 10 texts that differ (case, width, white space and encoding of accents do not count)"
    raise RewardError(f"choices is {excerpt(choices)}: give {differing}, or None for an open question")


@lru_cache(4096)
def _find_choice(solution: str, options: tuple[str, ...]) -> int:
    """Return the option that a solution names, by letter, text or a statement; -1 if it names none or two."""
    read = _read_option(to_half_width(solution), "tag", options) or stated_answer(solution, options)
    exact = {i for i, option in enumerate(options) if to_half_width(option).strip() == to_half_width(solution).strip()}
    meant = exact | ({read.value} if read and isinstance(read.value, int) else set())
    return meant.pop() if len(meant) == 1 else -1


def states_answer(text: str, solution: Solution) -> bool:
    """Return whether a completion states any answer, right or wrong, of the kind of `solution`."""
    stated = stated_answer(text, solution.choices, is_open=solution.index is None)
    return stated is not None and not stated.excluded


def is_right(text: str, solution: Solution) -> bool:
    """Return whether a completion states `solution` or another accepted answer."""
    for gold in (solution, *solution.others):
        answer = stated_answer(text, solution.choices, is_open=gold.index is None)
        value = None if answer is None else answer.value
        is_same = is_same_open_answer(gold.text, value) if isinstance(value, str) else value == gold.index
        if value is not None and is_same:
            return True
    return False
