"""The methods of the bench: a name, what it changes of the trainer's options, the rewards beside accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from methods.tasks import Task

CONTROLS = Path(__file__).with_name("controls.py")


@dataclass(frozen=True)
class Method:
    """A contender.

    Attributes:
        options: of `DAPOConfig`.
        rewards: reward -> weight, beside accuracy (1) and format (0.2).
        keeps: the option that takes the share of tokens that are kept, if there is one: the oracle's share.
        knows: whether it is told which tokens are read off the image, and which are filler.
        learning_rates: to choose from.
    """

    options: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    keeps: str | None = None
    knows: bool = False
    learning_rates: tuple[float, ...] = (1.5e-4, 3e-4, 6e-4)

    def with_sgd(self) -> "Method":
        """Return it with plain gradient descent in Adam's place."""
        return replace(self, options=self.options | {"optim": "sgd"}, learning_rates=(0.1, 0.3, 0.6))

    def options_for(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return its options on a task."""
        chosen = dict(self.options)
        if self.keeps is not None:
            chosen[self.keeps] = task.perceived_length / task.plain_length
        if self.knows:
            chosen["plugin_options"] = {
                "perceived_ids": ids_of(task.perceived_words, tokenizer),
                "filler_ids": ids_of(task.filler, tokenizer),
            }
        return chosen


def ids_of(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of words, with and without a space before them."""
    found = [tokenizer(text, add_special_tokens=False).input_ids for word in words for text in (word, f" {word}")]
    return sorted({ids[0] for ids in found if len(ids) == 1})


METHODS = {
    "plain": Method(),
    "perception filter": Method({"enable_perception_filtering": True}, keeps="top_p_perception_tokens"),
    "VPPO": Method(
        {
            "enable_perception_filtering": True,
            "top_p_perception_tokens": 0.4,
            "enable_trajectory_reweighting": True,
            "trajectory_scaling_min": 0.9,
        }
    ),
    "soft weights": Method({"enable_perception_filtering": True, "perception_weighting": "soft"}),
    "entropy filter": Method({"enable_entropy_filtering": True}, keeps="top_p_entropy_tokens"),
    "token weights": Method({"token_weights": True}),
    "oracle": Method({"credit_rules": [f"{CONTROLS}:oracle"]}, knows=True),
    "no filler": Method({"credit_rules": [f"{CONTROLS}:no_filler"]}, knows=True),
    "random": Method({"credit_rules": [f"{CONTROLS}:at_random"]}, knows=True),
    "VGR reward": Method(rewards={"vgr": 0.2}),
    "VGR reward, scaled": Method({"attention_reward_scale": "accuracy"}, {"vgr": 0.2}),
    "MDI reward": Method(rewards={"mdi": 0.2}),
    "noisy generations": Method({"noisy_generations": 4}),
}
METHODS |= {f"{name}, SGD": METHODS[name].with_sgd() for name in ("plain", "perception filter", "oracle")}
