"""Write questions as prompts for the model."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vgr_trl.utils import ConfigError, DataError, error_text, limit_seconds

LETTERS = "ABCDEFGHIJ"
VIDEO_PLACEHOLDER = re.compile(r"[ \t]*<video>[ \t]*\n?")
PLACEHOLDER = "<image>"  # of an image in the text of a question, as LLaVA, ms-swift and EasyR1 write it
SYSTEM_PROMPT = (
    "Look at the image and reason about the question before you answer. Write your reasoning between <think> and "
    "</think>, then only the final answer between <answer> and </answer>. For a multiple-choice question the final "
    "answer is the letter of the right option."
)
SYSTEM_PROMPTS = {
    "en": SYSTEM_PROMPT,
    "zh": (
        "请先观察图片并针对问题进行推理，再作答。把推理过程写在 <think> 和 </think> 之间，"
        "然后只把最终答案写在 <answer> 和 </answer> 之间。对于选择题，最终答案是正确选项的字母。"
    ),
}

Part = dict[str, Any]
SECONDS, CHARACTERS = 5.0, 1_000_000  # in which a template is filled in, and of what it makes


def require_placeholders(prompt: str | Sequence[Part], images: int, has_videos: bool = False) -> None:
    """Raise `DataError` if `prompt`, a text or a conversation, has placeholders, but not as many as there are images.

    Args:
        prompt: with `<image>` in the texts of the user, or parts of type `image`.
        has_videos: whether it has videos, whose frames come before the text.
    """
    if isinstance(prompt, str):
        found = prompt.count(PLACEHOLDER)
    else:
        found = sum(part.get("type") == "image" for part in _parts_of(placed(prompt)))
    if found and has_videos:
        raise DataError("its prompt has <image> beside a video, whose frames come first: remove the placeholders")
    if found and found != images:
        raise DataError(f"its prompt has {found} <image> placeholders, but there are {images} images")


def placed(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with a part of type `image` for each `<image>` in a text of the user, else as it is."""
    has_placeholders = any(PLACEHOLDER in str(part.get("text")) for part in _parts_of(conversation, "user"))
    if not has_placeholders and all(isinstance(message["content"], str) for message in conversation):
        return list(conversation)
    return [
        {**message, "content": list(chain.from_iterable(map(_split, parts)) if message["role"] == "user" else parts)}
        for message, parts in ((message, to_parts(message["content"])) for message in conversation)
    ]


def drop_video_placeholders(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation without `<video>`: its frames are images.

    Raises:
        DataError: a message has a part of type `video`, whose place frames cannot take.
    """
    if any(part.get("type") == "video" for part in _parts_of(conversation)):
        raise DataError("its prompt has a part of type video: give the text alone, and the video in `videos`")
    contents = [message["content"] for message in conversation]
    contents = [VIDEO_PLACEHOLDER.sub("", text) if isinstance(text, str) else text for text in contents]
    return [{**message, "content": text} for message, text in zip(conversation, contents, strict=True)]


def to_parts(content: Any) -> list[Part]:
    """Return the content of a message as parts, without what a table has filled in."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def texts_of(conversation: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of a conversation."""
    return (part["text"] for part in _parts_of(conversation) if isinstance(part.get("text"), str))


def _split(part: Part) -> Iterator[Part]:
    if part.get("type") != "text" or PLACEHOLDER not in part["text"]:
        yield part
        return
    for number, text in enumerate(part["text"].split(PLACEHOLDER)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def _parts_of(conversation: Sequence[dict[str, Any]], role: str | None = None) -> Iterator[Part]:
    return (
        part for message in conversation if role in (None, message["role"]) for part in to_parts(message["content"])
    )


class SystemTemplate:
    """A system prompt of the user's, written as a Jinja2 template and filled in for each question.

    It knows `problem` (a text), `choices` (a list, empty for an open question), `letters` (those of the choices) and
    `source` (of the row, or an empty text). It runs in Jinja2's sandbox. A text without `{{`, `{%` and `{#` stays as
    it is.

    Args:
        name: what messages call it, the path of its file for example.

    Raises:
        ConfigError: it is no template, or names a variable that there is not.
    """

    variables: tuple[str, ...] = ("problem", "choices", "letters", "source")

    def __init__(self, text: str, name: str = "the system prompt") -> None:
        self.text, self.name = text, name
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        try:
            self._template = environment.from_string(text)
            unknown = meta.find_undeclared_variables(environment.parse(text)) - {*self.variables, *environment.globals}
        except (TemplateError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{name} is not a Jinja2 template ({error_text(error)}): correct it there.") from error
        if unknown:
            raise ConfigError(f"{name} names {', '.join(sorted(unknown))}, but knows {', '.join(self.variables)} only.")

    def __reduce__(self) -> Any:
        """Send the text to other processes, and hash it, as a compiled template is not the same twice."""
        return type(self), (self.text, self.name)

    def render(self, problem: str, choices: Sequence[str] | None = None, source: str | None = None) -> str | None:
        """Return the system prompt of a question, None where it comes out empty.

        Raises:
            DataError: the template fails on this question, or makes more than a million characters of it.
            ConfigError: it computes for more than five seconds.
        """
        options = list(choices or ())
        return self._filled(problem=problem, choices=options, letters=[*LETTERS[: len(options)]], source=source or "")

    def _filled(self, **values: Any) -> str | None:
        text = ""
        try:
            with limit_seconds(SECONDS, TimeoutError):
                for part in self._template.generate(**values):
                    text += part
                    if len(text) > CHARACTERS:
                        raise OverflowError(f"it makes more than {CHARACTERS:,} characters")
        except TimeoutError as error:
            raise ConfigError(
                f"{self.name} computes for more than {SECONDS:g} seconds for one question: take its loops out."
            ) from error
        except Exception as error:  # expressions of a template raise whatever Python's do
            raise DataError(f"{self.name} cannot be filled in for it ({error_text(error)})") from error
        return text.strip() or None


class QuestionTemplate(SystemTemplate):
    """User message as a Jinja2 template, with the question as `content` (and `problem`).

    There is no system prompt then. Args and errors are those of `SystemTemplate`.
    """

    variables = ("content", "problem")

    def question(self, problem: str) -> str:
        """Return what the user says.

        Raises:
            DataError: the template fails on this question, or leaves nothing of it.
        """
        text = self._filled(content=problem, problem=problem)
        if text is None:
            raise DataError(f"{self.name} leaves nothing of it")
        return text


def format_question(problem: str, choices: Sequence[str] | None = None) -> str:
    """Return the question with its options, if any, each on a line of its own behind its letter.

    Raises:
        DataError: there are more options than letters.
    """
    if not choices:
        return problem
    if len(choices) > len(LETTERS):
        raise DataError(f"A question has {len(choices)} choices: give at most {len(LETTERS)}.")
    return "\n".join([problem, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))])


def build_prompt(
    problem: str | Sequence[dict[str, Any]],
    choices: Sequence[str] | None = None,
    *,
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT,
    source: str | None = None,
) -> list[dict[str, Any]]:
    """Return the conversation that asks `problem`; images travel beside it in the column `image` or `images`.

    Args:
        problem: the question, or a conversation that ends with it.
        choices: its options, at most ten.
        system_prompt: the message put first, a text or a template that is filled in; None: none. Of a
            `QuestionTemplate` it is what the user says.
        source: where the question comes from, for templates.

    Raises:
        DataError: there are more options than letters, or the template fails.
    """
    if not isinstance(problem, str):
        if isinstance(system_prompt, QuestionTemplate):
            raise DataError(f"its question is a conversation, which {system_prompt.name} cannot be filled in with")
        turns, problem = [*problem], " ".join(texts_of(problem[-1:]))
    else:
        asked = format_question(problem, choices)
        if isinstance(system_prompt, QuestionTemplate):
            return [{"role": "user", "content": system_prompt.question(asked)}]
        turns = [{"role": "user", "content": asked}]
    if isinstance(system_prompt, SystemTemplate):
        system_prompt = system_prompt.render(problem, choices, source)
    return [{"role": "system", "content": system_prompt}, *turns] if system_prompt else turns


def special_tokens(processor: Any) -> re.Pattern[str] | None:
    """Return a pattern that finds the special tokens of a processor's tokenizer, None if it has none.

    Args:
        processor: of a model, or its tokenizer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    for name in ("image_token", "video_token", "audio_token"):
        if isinstance(token := getattr(processor, name, None), str):
            found.add(token)
    longest_first = sorted(found - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def special_problem(special: re.Pattern[str] | None, conversation: Sequence[dict[str, Any]]) -> str | None:
    """Return which special token a text of a conversation has first, in one sentence, or None if there is none."""
    found = None if special is None else next(filter(None, map(special.search, texts_of(placed(conversation)))), None)
    if found is None:
        return None
    return f"its text has {found[0]!r}, which the model's tokenizer reads as a special token: remove it"
