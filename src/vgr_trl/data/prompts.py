"""Write questions as prompts for the model, and drop prompts that are too long."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from datasets.fingerprint import Hasher
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL import Image
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.images import Size, image_size, images_of
from vgr_trl.errors import ConfigError, DataError, error_text
from vgr_trl.processes import limit_seconds
from vgr_trl.rewards.answers import LETTERS

TEMPLATE_SECONDS = 10  # computing time for one question
PLACEHOLDER = "<image>"  # stands for an image in a question's text, in LLaVA, ms-swift and EasyR1, too
LONGEST_CONTEXT = 20_000  # characters that a teacher reads beside the prompt
VIDEO_PLACEHOLDER = re.compile(r"[ \t]*<video>[ \t]*\n?")
SYSTEM_PROMPTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("system_prompts.yaml").read_bytes())
SYSTEM_PROMPT = SYSTEM_PROMPTS["en"]

# What a template for a message of this role may use.
VARIABLES = {"system": ("problem", "choices", "letters", "source"), "user": ("content", "problem")}

Messages = Sequence[Mapping[str, Any]]


def to_parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as parts, without empty fields of a table."""
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
    """Raise `DataError` if a conversation has placeholders, but not one for each image.

    Args:
        conversation: messages.
        images: number of images of the row.
        has_videos: whether the row has videos, beside which no placeholder is accepted.
    """
    count = sum(part.get("type") == "image" for part in _parts_of(placed(conversation)))
    if count and has_videos:
        raise DataError("its prompt has <image> beside a video, whose frames come first: remove the placeholders")
    if count and count != images:
        raise DataError(f"its prompt has {count} <image> placeholders, but there are {images} images")


def drop_video_placeholders(conversation: Messages) -> list[dict[str, Any]]:
    """Return a conversation without `<video>`, as frames are images, or raise `DataError` for parts of type `video`."""
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
        raise ConfigError(f"{name} computes for more than {TEMPLATE_SECONDS} s on a question: correct it.") from None


class PromptTemplate:
    """A message of the prompt as a Jinja2 template of the user's, filled in for each question in Jinja2's sandbox.

    Args:
        text: a system prompt may use `problem`, `choices` (a list, empty for an open question), `letters` (of the
            choices) and `source` (of the row, or an empty text); a user message `content`, the question with its
            options, which is also called `problem`. A text without `{{`, `{%` and `{#` stays as it is.
        name: how messages call the template, for example the path of its file.
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
            defined = ", ".join(VARIABLES[role])
            raise ConfigError(f"{name} uses {', '.join(sorted(unknown))}, but only {defined} are defined.")

    def __reduce__(self) -> Any:
        """Pickle and hash the text, as a compiled template is not the same twice."""
        return type(self), (self.text, self.name, self.role)

    def fill(self, **values: Any) -> str:
        """Return the message for one question, or raise `DataError` if the template fails on it."""
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
    """Return the conversation that asks a question, without its images.

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
    """Return a pattern that finds the special tokens that no text of a row may hold, None if there are none.

    They are placeholders and control tokens: tokens that the tokenizer or processor names or the chat template writes.
    Others, such as a `<think>` that was added to the tokenizer, may stand in a text.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    texts = [str(tokenizer.chat_template), *(text for text in vars(processor).values() if isinstance(text, str))]
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {token.content for token in added if token.special and token.content in "\n".join(texts)}
    tokens |= {*tokenizer.special_tokens_map.values()}
    tokens |= {str(getattr(processor, f"{kind}_token", None) or "") for kind in ("image", "video", "audio")}
    longest_first = sorted(tokens - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def refuse_special_tokens(special: re.Pattern[str] | None, conversation: Messages, context: Any = None) -> None:
    """Raise `DataError` if a text that a model reads has a special token.

    Args:
        special: finds special tokens.
        conversation: the prompt.
        context: text of the column `privileged_context` for a teacher, without placeholders.
    """
    told = context or ""
    if not isinstance(told, str) or len(told) > LONGEST_CONTEXT or PLACEHOLDER in told:
        accepted = f"up to {LONGEST_CONTEXT} characters without {PLACEHOLDER}"
        raise DataError(f"its privileged_context is {context!r:.80}: give {accepted}")
    for text in (told, *texts_of(placed(conversation))):
        if special is not None and (match := special.search(text)):
            token = f"{match[0]!r}, which the model's tokenizer reads as a special token"
            raise DataError(f"its text has {token}: remove it, and give messages without a chat template applied")


SIZES = "__sizes__"  # column: (width, height) of a row's images and frames in the size that the model gets
PROBES = ((640, 480), (300, 500), (1300, 900))  # sizes with which a processor's own count is compared
QUESTION = [{"role": "user", "content": "What is shown?"}]


def image_sizes_of(row: Mapping[str, Any]) -> list[Size]:
    """Return (width, height) of the images of a row, from the column that `prepare_rows` adds or from headers."""
    if row.get(SIZES) is not None:
        return [(width, height) for width, height in row[SIZES]]
    return [image_size(value) for value in images_of(row)]


def require_ending_template(processor: Any, template: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the chat template of a processor or tokenizer computes for too long on a question."""
    with limited(f"The chat template of {type(processor).__name__}"), suppress(Exception):  # its use reports errors
        processor.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False, **template)


class PromptLengths:
    """Count the tokens of prompts as TRL tokenizes them.

    The number of an image's tokens is a function of its size, which transformers has for most families. The markers
    around images are found by comparing with the processor's own count on blank images. Where the two do not differ by
    a constant, or there is no such function, a blank image of each size is processed once.

    Args:
        processor: processor of the model, or its tokenizer for text alone.
        template: further arguments of `apply_chat_template`.
    """

    def __init__(self, processor: Any, **template: Any) -> None:
        require_ending_template(processor, template)
        self.processor, self.template = processor, template
        self.reads_images = isinstance(processor, ProcessorMixin)
        self.tokenizer: Any = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
        self._processed: dict[tuple[Size, ...], int] = {}
        self._by_size: dict[Size, int] = {}
        self._markers = self._calibrate() if self.reads_images else None
        # Whether blank images are processed, which must not happen in a forked process: torch may hang there.
        self.needs_pixels = self.reads_images and self._markers is None

    @property
    def key(self) -> str:
        """A hash of the processor and the template, on which lengths depend besides the rows."""
        images = vars(self.processor).get("image_processor")
        about = [type(self.processor).__name__, self.tokenizer.get_vocab(), images and images.to_dict()]
        about += [self.processor.chat_template, self.tokenizer.chat_template]
        return str(Hasher.hash([json.dumps(about, sort_keys=True, default=str), self.template]))

    def __call__(self, row: Mapping[str, Any]) -> int:
        """Return the number of tokens of a row's `prompt`, which has placeholders for its images.

        Raises:
            ConfigError: the row has images, and there is a tokenizer only.
            DataError: the chat template refuses the prompt.
        """
        prompt, sizes = row["prompt"], image_sizes_of(row)
        if sizes and not self.reads_images:
            raise ConfigError(f"The data have images, but {type(self.processor).__name__} reads text only.")
        try:
            if not sizes:
                return self._processor_count(prompt, [])
            return self._text_tokens(prompt, len(sizes)) + self.image_tokens(sizes)
        except Exception as error:  # templates and processors raise whatever a prompt leads them to
            raise DataError(f"the model's processor refuses its prompt ({error_text(error)})") from error

    def image_tokens(self, sizes: Sequence[Size]) -> int:
        """Return the number of tokens that images of these sizes add to a prompt with a placeholder for each."""
        if self._markers is None:
            return self._processed_tokens(tuple(sizes))
        per_image, per_prompt = self._markers
        return self._counted(sizes) + per_image * len(sizes) + per_prompt

    def _calibrate(self) -> tuple[int, int] | None:
        """Return the number of marker tokens per image and per prompt, or None if sizes do not give the count."""
        first, second, third = PROBES
        try:
            (single,) = {self._processed_tokens((size,)) - self._counted([size]) for size in PROBES}
        except Exception:  # no such function, or not a constant
            return None
        try:
            pairs = {self._processed_tokens(pair) - self._counted(pair) for pair in ((first, second), (third, first))}
        except Exception:  # a model of one image
            return single, 0
        return (max(pairs) - single, 2 * single - max(pairs)) if len(pairs) == 1 else None

    def _processed_tokens(self, sizes: tuple[Size, ...]) -> int:
        if sizes not in self._processed:
            blank = [Image.new("RGB", size) for size in sizes]
            self._processed[sizes] = self._processor_count(QUESTION, blank) - self._text_tokens(QUESTION, len(sizes))
        return self._processed[sizes]

    def _counted(self, sizes: Sequence[Size]) -> int:
        for width, height in {*sizes} - self._by_size.keys():
            if hasattr(self.processor, "_get_num_multimodal_tokens"):
                count = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)]).num_image_tokens[0]
            else:  # PaddleOCR-VL and relatives of Qwen2-VL
                images = self.processor.image_processor
                count = images.get_number_of_image_patches(height, width, {}) // images.merge_size**2
            self._by_size[width, height] = int(count)
        return sum(self._by_size[size] for size in sizes)

    def _processor_count(self, prompt: Any, images: Sequence[Image.Image]) -> int:
        """Return the number of tokens of a prompt by calling the processor as TRL does."""
        if isinstance(prompt, str):
            return len(self.processor(text=[prompt])["input_ids"][0])
        messages = prepare_multimodal_messages(prompt, list(images)) if self.reads_images else prompt
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.template}
        return len(self.processor.apply_chat_template(conversation=[messages], **options)["input_ids"][0])

    def _text_tokens(self, prompt: Any, images: int) -> int:
        """Return the number of tokens of a conversation's text with a placeholder for each image."""
        messages = prepare_multimodal_messages(prompt, [Image.new("RGB", (1, 1))] * images)
        options = {"add_generation_prompt": True, "tokenize": False, **self.template}
        (text,) = self.processor.apply_chat_template(conversation=[messages], **options)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def refuse_single_image_models(processor: Any) -> None:
    """Raise `ConfigError` if a processor ignores the second of two images; a failing processor raises its own error."""
    lengths, blank = PromptLengths(processor), Image.new("RGB", PROBES[0])
    if lengths._processor_count(QUESTION, [blank] * 2) <= lengths._processor_count(QUESTION, [blank]):
        name = type(processor).__name__
        raise ConfigError(f"{name} reads one image per prompt, but a video becomes several: use another model.")
