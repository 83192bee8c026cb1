"""Options of blind answers: questions answered again from what a completion says of the image."""

import re
from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import one_of
from vgr_trl.errors import ConfigError

BLIND_PROMPT = (
    "This is what was written about an image that you cannot see:\n{description}\n\nQuestion: {question}\n\nAnswer the "
    "question from this description alone. Write your reasoning between <think> and </think>, then only the final "
    "answer between <answer> and </answer>. For a multiple-choice question the final answer is the letter of the right "
    "option."
)


@dataclass
class BlindOptions:
    """How a question is asked again without its image (Vision-SR1, https://huggingface.co/papers/2508.19652)."""

    blind_tag: str = option(
        "description", "Tag of a completion between which it describes the image, for blind answers."
    )
    blind_without_tag: Annotated[str, one_of("wrong", "completion")] = option(
        "wrong",
        "Blind answers of completions without a description: wrong, or from the whole completion, as published.",
    )
    blind_prompt: str = option(
        BLIND_PROMPT, "What is asked for a blind answer, a text with {description} and {question}."
    )

    def check_blind(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        if not isinstance(self.blind_tag, str) or not re.fullmatch(r"\w+", self.blind_tag):
            raise ConfigError(f"blind_tag is {self.blind_tag!r}: give the name of a tag, such as description.")
        for name in ("{description}", "{question}"):
            if name not in str(self.blind_prompt):
                raise ConfigError(f"blind_prompt has no {name}: put it where that is to stand.")
