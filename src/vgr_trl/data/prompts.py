"""Write questions as prompts for the model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vgr_trl.errors import ConfigError, DataError, error_text
from vgr_trl.processes import limit_seconds
from vgr_trl.rewards.answers import LETTERS

TEMPLATE_SECONDS = 10  # of computing, for one question
PLACEHOLDER = "<image>"  # of an image in the text of a question, as LLaVA, ms-swift and EasyR1 write it
VIDEO_PLACEHOLDER = re.compile(r"[ \t]*<video>[ \t]*\n?")
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

# What a template for a message of this role may use.
VARIABLES = {"system": ("problem", "choices", "letters", "source"), "user": ("content", "problem")}

Messages = Sequence[Mapping[str, Any]]


def to_parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as parts, without the fields that a table has filled with None."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _parts_of(conversation: Messages) -> Iterator[dict[str, Any]]:
    return (part for message in conversation for part in to_parts(message["content"]))


def texts_of(conversation: Messages) -> Iterator[str]:
    """Yield the texts of a conversation."""
    return (part["text"] for part in _parts_of(conversation) if isinstance(part.get("text"), str))


def placed(conversation: Messages) -> list[dict[str, Any]]:
    """Return a conversation with a part of type `image` for each `<image>` in a text of the user."""
    made = []
    for message in conversation:
        parts = to_parts(message["content"])
        if message["role"] == "user":
            parts = [piece for part in parts for piece in _split(part)]
        made.append({**message, "content": parts})
    has_parts = not all(isinstance(message["content"], str) for message in conversation)
    has_images = any(part.get("type") == "image" for part in _parts_of(made))
    return made if has_parts or has_images else [dict(message) for message in conversation]


def _split(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part.get("type") != "text" or PLACEHOLDER not in part["text"]:
        yield part
        return
    for number, text in enumerate(part["text"].split(PLACEHOLDER)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def require_placeholders(conversation: Messages, images: int, has_videos: bool = False) -> None:
    """Raise `DataError` if a conversation has placeholders, but not as many as there are images."""
    found = sum(part.get("type") == "image" for part in _parts_of(placed(conversation)))
    if found and has_videos:
        raise DataError("its prompt has <image> beside a video, whose frames come first: remove the placeholders")
    if found and found != images:
        raise DataError(f"its prompt has {found} <image> placeholders, but there are {images} images")


def drop_video_placeholders(conversation: Messages) -> list[dict[str, Any]]:
    """Return a conversation without `<video>`, as frames are images; refuse parts of type `video` (`DataError`)."""
    if any(part.get("type") == "video" for part in _parts_of(conversation)):
        raise DataError("its prompt has a part of type video: give the text alone, and the video in `videos`")
    contents = [message["content"] for message in conversation]
    contents = [VIDEO_PLACEHOLDER.sub("", text) if isinstance(text, str) else text for text in contents]
    return [{**message, "content": text} for message, text in zip(conversation, contents, strict=True)]


class _Endless(BaseException):
    """Passes every handler of errors in a template."""


@contextmanager
def limited(name: str) -> Iterator[None]:
    """Raise `ConfigError` if the template called `name` computes for too long in this block."""
    try:
        with limit_seconds(TEMPLATE_SECONDS, _Endless):
            yield
    except _Endless:
        seconds = f"more than {TEMPLATE_SECONDS} s on one question"
        raise ConfigError(f"{name} computes for {seconds}: correct its loops, or give another template.") from None


class PromptTemplate:
    """A message of the prompt as a Jinja2 template of the user's, filled in for each question in Jinja2's sandbox.

    Args:
        text: a system prompt may use `problem`, `choices` (a list, empty for an open question), `letters` (of the
            choices) and `source` (of the row, or an empty text); a user message `content`, the question with its
            options, which is also called `problem`. A text without `{{`, `{%` and `{#` stays as it is.
        name: of the template in messages, for example the path of its file.
        role: `system`, or `user` for a message that replaces the question, without a system prompt.

    Raises:
        ConfigError: the text is no template, or uses an unknown variable.
    """

    def __init__(self, text: str, name: str = "the system prompt", role: str = "system") -> None:
        self.text, self.name, self.role = text, name, role
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        try:
            self._template = environment.from_string(text)
            unknown = meta.find_undeclared_variables(environment.parse(text)) - {*VARIABLES[role], *environment.globals}
        except TemplateError as error:
            raise ConfigError(f"{name} is not a Jinja2 template ({error_text(error)}): correct it there.") from error
        if unknown:
            known = ", ".join(VARIABLES[role])
            raise ConfigError(f"{name} uses {', '.join(sorted(unknown))}, but only {known} are defined.")

    def __reduce__(self) -> Any:
        """Pickle and hash the text, as a compiled template is not the same twice."""
        return type(self), (self.text, self.name, self.role)

    def fill(self, **values: Any) -> str:
        """Return the message for one question; raise `DataError` if the template fails on it."""
        with limited(self.name):
            try:
                return self._template.render(values).strip()
            except Exception as error:  # expressions of a template raise whatever Python's do
                raise DataError(f"{self.name} fails on it ({error_text(error)})") from error


def format_question(problem: str, choices: Sequence[str] | None = None) -> str:
    """Return the question with its options, at most ten, each on a line of its own behind its letter."""
    if len(choices or ()) > len(LETTERS):
        raise DataError(f"A question has {len(choices or ())} choices: give at most {len(LETTERS)}.")
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices or (), strict=False)]
    return "\n".join([problem, *options])


def build_prompt(
    problem: str | Messages,
    choices: Sequence[str] | None = None,
    *,
    system_prompt: str | PromptTemplate | None = SYSTEM_PROMPT,
    source: str | None = None,
) -> list[dict[str, Any]]:
    """Return the conversation that asks `problem`; images travel beside it in the column `image` or `images`.

    Args:
        problem: the question, or a conversation that ends with it.
        choices: its options, at most ten.
        system_prompt: the first message, a text or a template; None: none. A template of the role `user` makes the
            user's message instead.
        source: where the question comes from, for templates.

    Raises:
        DataError: there are more options than letters, or the template fails.
    """
    if isinstance(problem, str):
        turns: list[Any] = [{"role": "user", "content": format_question(problem, choices)}]
    else:
        turns = [*problem]
    if isinstance(system_prompt, PromptTemplate):
        asked = " ".join(texts_of(turns[-1:]))
        if system_prompt.role == "user":
            if not isinstance(problem, str):
                raise DataError(f"its question is a conversation, but {system_prompt.name} needs a text")
            content = system_prompt.fill(content=asked, problem=asked)
            if not content:
                raise DataError(f"{system_prompt.name} gives an empty prompt")
            return [{"role": "user", "content": content}]
        options = list(choices or ())
        about = {"choices": options, "letters": [*LETTERS[: len(options)]], "source": source or ""}
        system_prompt = system_prompt.fill(problem=problem if isinstance(problem, str) else asked, **about)
    return [{"role": "system", "content": system_prompt}, *turns] if system_prompt else turns


def special_tokens(processor: Any) -> re.Pattern[str] | None:
    """Return a pattern that finds the special tokens of a processor or tokenizer, None if it has none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    found |= {str(getattr(processor, f"{kind}_token", None) or "") for kind in ("image", "video", "audio")}
    longest_first = sorted(found - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def special_problem(special: re.Pattern[str] | None, conversation: Messages) -> str | None:
    """Return which special token a text of a conversation has first, in one sentence, or None if there is none."""
    found = None if special is None else next(filter(None, map(special.search, texts_of(placed(conversation)))), None)
    if found is None:
        return None
    return f"its text has {found[0]!r}, which the model's tokenizer reads as a special token: remove it"
