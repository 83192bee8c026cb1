"""`DAPOConfig`: TRL's options and the options of `vgr_trl.config`."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from trl import GRPOConfig

from vgr_trl.config import (
    SWITCHES,
    BlindOptions,
    CriticOptions,
    DegradedOptions,
    EfficiencyOptions,
    EvaluateOptions,
    GroupOptions,
    KLOptions,
    LossOptions,
    MeasureOptions,
    ReportOptions,
    check_conflicts,
)
from vgr_trl.errors import ConfigError
from vgr_trl.options import RATIO_LOSSES, check_options, option

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
_AT_LEAST_1 = (
    "num_generations_eval", "num_iterations", "steps_per_generation", "max_completion_length",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
_AT_LEAST_0 = ("epsilon", "delta", "learning_rate", "weight_decay", "max_grad_norm")
# Limits of options of TRL and transformers that are otherwise checked only when used.
_LIMITS = {name: {"ge": 1} for name in _AT_LEAST_1} | {name: {"ge": 0} for name in _AT_LEAST_0}
_LIMITS |= {"temperature": {"gt": 0}, "top_p": {"gt": 0, "le": 1}}

# Spellings of users' scripts, EasyR1 and verl -> the option they set, as a flag, in a file and in Python.
SPELLINGS = {
    "eval_num_generations": "num_generations_eval",
    "prompt_preview_chars": "prompt_preview_length",
    "completion_preview_chars": "completion_preview_length",
    "out_dir": "output_dir",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_dual": "delta",
    "late_reward_weights": "reward_weights",
    "enable_token_weights": "token_weights",
    "token_weight_clip": "token_weights_clip",
    "token_weight_smooth_sigma": "token_weights_smooth_sigma",
    "token_weight_last_k_layers": "token_weights_last_k_layers",
    "loss_avg_mode": "loss_type",
}
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "seq": "grpo"}  # values of `loss_avg_mode`
SEGMENTED = "use_segmented_reward_weights"  # early_reward_weights alone switch them on


def rename_options(stated: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rename other spellings of options, and print a line for each.

    Args:
        stated: options by name or spelling.
        where: the place that states them, for messages.

    Raises:
        ConfigError: an option and another spelling of it are both given.
    """
    values = dict(stated)
    if values.pop(SEGMENTED, True) is False:
        values.pop("early_reward_weights", None)
    for spelling in [name for name in SPELLINGS if name in values]:
        name, value = SPELLINGS[spelling], values.pop(spelling)
        if name in values:
            raise ConfigError(f"{where} has {spelling} and {name}, which are the same option: give one of them.")
        values[name] = LOSS_TYPES.get(value, value) if name == "loss_type" else value
        if os.environ.get("RANK", "0") == "0":
            print(f"{spelling} sets {name}, its name here.", file=sys.stderr)
    return values


def _accept_spellings(config: type[GRPOConfig]) -> Any:
    """Let the constructor of a configuration take the spellings of `SPELLINGS`."""
    initialize = config.__init__

    @wraps(initialize)
    def rename(self: GRPOConfig, *positional: Any, **options: Any) -> None:
        initialize(self, *positional, **rename_options(options, "DAPOConfig"))

    config.__init__ = rename  # type: ignore[method-assign]
    return config


class _One(int):
    """A single completion per prompt, which TRL refuses even where no completions are compared."""

    def __lt__(self, other: int) -> bool:
        return False


@_accept_spellings
@dataclass
class DAPOConfig(
    ReportOptions,
    EvaluateOptions,
    EfficiencyOptions,
    GroupOptions,
    LossOptions,
    CriticOptions,
    KLOptions,
    BlindOptions,
    DegradedOptions,
    MeasureOptions,
    GRPOConfig,
):
    """Options of `DAPOTrainer`: TRL's `GRPOConfig` with the defaults of DAPO, `vgr_trl.config`, and the options below.

    Each option is described by its `help` (`vgr-trl train --help`).

    Changed defaults: `epsilon_high=0.28` (DAPO's clip-higher; https://huggingface.co/papers/2503.14476), and
    `metric_for_best_model="eval_reward"` with `load_best_model_at_end`. TRL's own defaults already are
    `loss_type="dapo"` and `beta=0.0`.

    Example:
        >>> config = DAPOConfig("run", num_generations=4, token_weights=True, use_cpu=True, bf16=False)
        >>> config.loss_type, config.epsilon_high, config.prompts_per_rollout
        ('dapo', 0.28, 2)

    Raises:
        ConfigError: an option is out of range, or contradicts another.
    """

    # fmt: off
    # TRL's default, restated so that a new default in TRL cannot change the training.
    loss_type: LossType = option("dapo", "Loss of TRL's GRPOTrainer, as TRL defines it.")
    beta: float = option(0.0, "Weight of the KL term to the reference model, at least 0; DAPO uses none.", ge=0)
    epsilon_high: float | None = option(0.28, "Upper clip range of the importance ratio (DAPO's clip-higher).", ge=0,
        needs={"loss_type": (*RATIO_LOSSES, "cispo")})
    resume_from_checkpoint: str | None = option(None, "Continue from this checkpoint; latest, or no path: the newest "
        "complete one.", nargs="?", const="latest")
    max_prompt_length: int | None = option(None, "Skip rows with longer prompts, image tokens included.", ge=1)
    share_prompts: Literal["auto", "on", "off"] = option("auto", "Compute each prompt once for its completions. auto: "
        "where results stay the same; on: also where a normaliser of the loss changes; off.")
    vision_cache_megabytes: int = option(1024, "Compute image features once per rollout if the vision tower is "
        "frozen, and keep up to this many MiB. 0: off.", ge=0)
    batching_cache_megabytes: float | None = option(None, "Most MiB of pages of continuous batching with images, freed "
        "before the update; None: as many as the rollout fills.", gt=0)
    warmup_ratio: float | None = option(None, "Share of all steps for learning-rate warm-up.", ge=0, lt=1)
    early_reward_weights: list[float] | None = option(None, "Reward weights during warm-up (or the first tenth).",
        needs="changing_weights")
    vgr_hard_negative: bool = option(False, "Give the vgr reward to right completions only.")
    attention_reward_scale: Literal["accuracy", "none"] = option("accuracy", "accuracy: scale attention rewards by "
        "how much the accuracy of a prompt's completions differs; none: do not scale, which lowers accuracy.")
    soft_punish_cache: int | None = option(None, "Tokens before max_completion_length over which the length reward "
        "falls to -1; None: a fifth of it.", ge=0, needs="length_reward")
    stop_on_collapse: bool = option(False, "Stop at the first sign of collapse instead of warning.")
    reward_timeout: float | None = option(None, "Seconds after which a warning names a reward function that is "
        "still running, with its rows and stack; not for asynchronous rewards, reward models or C code.", gt=0)
    # fmt: on

    def __post_init__(self) -> None:
        for name in ("share_prompts", *SWITCHES):  # YAML reads on and off as True and False
            if isinstance(value := vars(self)[name], bool):
                setattr(self, name, "on" if value else "off")
        # TRL takes a tuple or an array too.
        self.reward_weights = None if self.reward_weights is None else [*map(float, self.reward_weights)]
        self.rows_per_pass = str(self.rows_per_pass)  # YAML parses "4" as an int
        check_options(self, _LIMITS)
        self.check_plugins()
        check_conflicts(self)
        if self.warmup_ratio is not None:
            self.warmup_steps = self.warmup_ratio
        if self.load_best_model_at_end:  # transformers takes the loss, which is noise here
            self.metric_for_best_model = self.metric_for_best_model or "eval_reward"
        alone = self.num_generations == 1
        if alone:
            self.num_generations = _One(1)
        super().__post_init__()
        if alone:
            self.num_generations = 1

    @property
    def prompts_per_rollout(self) -> int:
        """Number of distinct prompts in a rollout, over all processes."""
        return int(self.generation_batch_size or 0) // int(self.num_generations or 1)

    @property
    def steps_per_rollout(self) -> float:
        """Number of optimizer steps that use a rollout."""
        return (self.steps_per_generation or 1) * self.num_iterations / self.gradient_accumulation_steps

    @property
    def most_rows_per_pass(self) -> int | None:
        """Largest number of rows of a training pass; None if no number is given."""
        return int(self.rows_per_pass) if self.rows_per_pass.isdigit() else None

    @property
    def uses_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.advantage_estimator == "gae"
