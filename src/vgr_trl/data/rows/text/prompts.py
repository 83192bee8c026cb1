"""How a question is written down for the model."""

from collections.abc import Sequence
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vgr_trl.errors import ConfigError, DataError, words_of

LETTERS = "ABCDEFGHIJ"

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
        self.name = name
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        try:
            unknown = meta.find_undeclared_variables(environment.parse(text)) - set(self.variables)
            self._template = environment.from_string(text)
        except (TemplateError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{name} is not a Jinja2 template ({words_of(error)}): correct it there.") from error
        unknown -= set(environment.globals)
        if unknown:
            raise ConfigError(
                f"{name} names {', '.join(sorted(unknown))}, but a template knows {', '.join(self.variables)} only."
            )

    def render(self, problem: str, choices: Sequence[str] | None = None, source: str | None = None) -> str | None:
        """Return the system prompt of a question, None where it comes out empty.

        Raises:
            DataError: the template fails on this question.
        """
        options = list(choices or ())
        return self._filled(
            problem=problem, choices=options, letters=list(LETTERS[: len(options)]), source=source or ""
        )

    def _filled(self, **values: Any) -> str | None:
        try:
            text = self._template.render(**values)
        except Exception as error:  # expressions of a template raise whatever Python's do
            raise DataError(f"{self.name} cannot be filled in for it ({words_of(error)})") from error
        return text.strip() or None


class QuestionTemplate(SystemTemplate):
    """What the user says in place of the question alone, a Jinja2 template that knows it as `content` (and `problem`).

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
    problem: str,
    choices: Sequence[str] | None = None,
    *,
    system_prompt: str | SystemTemplate | None = SYSTEM_PROMPT,
    source: str | None = None,
) -> list[dict[str, Any]]:
    """Return the conversation that asks `problem`; images travel beside it in the column `image` or `images`.

    Args:
        choices: its options, at most ten.
        system_prompt: the message put first, a text or a template that is filled in; None: none. Of a
            `QuestionTemplate` it is what the user says.
        source: where the question comes from, for templates.

    Raises:
        DataError: there are more options than letters, or the template fails.
    """
    asked = format_question(problem, choices)
    if isinstance(system_prompt, QuestionTemplate):
        return [{"role": "user", "content": system_prompt.question(asked)}]
    question = {"role": "user", "content": asked}
    return [*system_message(system_prompt, problem, choices, source), question]


def system_message(
    system_prompt: str | SystemTemplate | None, problem: str, choices: Sequence[str] | None, source: str | None
) -> list[dict[str, Any]]:
    """Return the message that is put before a question, or no message; see `build_prompt`."""
    if isinstance(system_prompt, SystemTemplate):
        system_prompt = system_prompt.render(problem, choices, source)
    return [{"role": "system", "content": system_prompt}] if system_prompt else []
