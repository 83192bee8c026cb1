"""Every option of the trainer, grouped by the stage that it steers."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral
from typing import Annotated

from trl import GRPOConfig

from vgr_trl.config import (
    SWITCHES,
    AliasOptions,
    BlindOptions,
    CreditOptions,
    CriticOptions,
    EfficiencyOptions,
    EvaluateOptions,
    GroupOptions,
    KLOptions,
    MeasureOptions,
    NoisyOptions,
    PerturbationOptions,
    PluginOptions,
    ReportOptions,
)
from vgr_trl.config_checks import check_options_of_trl, refuse_conflicts
from vgr_trl.options import LARGEST, SMALLEST, Natural, Switch, check_values, in_range, is_number, one_of, option
from vgr_trl.utils import ConfigError

_LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


@dataclass
class DAPOConfig(
    AliasOptions,
    ReportOptions,
    EvaluateOptions,
    EfficiencyOptions,
    GroupOptions,
    CreditOptions,
    CriticOptions,
    KLOptions,
    BlindOptions,
    NoisyOptions,
    PerturbationOptions,
    MeasureOptions,
    PluginOptions,
    GRPOConfig,
):
    """Options of `DAPOTrainer`: those of TRL's `GRPOConfig` with the defaults of DAPO, those of the stages, and the
    ones below. What an option does is its `help` (`vgr-trl train --help`).

    Changed defaults: `epsilon_high=0.28` (DAPO's clip-higher; https://huggingface.co/papers/2503.14476). TRL's own
    defaults already are `loss_type="dapo"` and `beta=0.0`.

    Raises:
        ConfigError: an option is out of range or contradicts its alias.
    """

    # The parent's default, restated so that a change of TRL's cannot change what this class trains.
    loss_type: Annotated[str, one_of(*_LOSS_TYPES)] = option(
        "dapo",
        "Loss of TRL's GRPOTrainer: dapo, grpo, dr_grpo, bnpo, cispo, sapo, luspo or vespo, as TRL defines them.",
    )
    beta: float = option(0.0, "Weight of the KL term to the reference model, at least 0; DAPO uses none.")
    epsilon_high: float | None = option(0.28, "Upper clip range of the importance ratio; DAPO's clip-higher is 0.28.")

    resume_from_checkpoint: str | None = option(
        None,
        "Continue from this checkpoint; without a path, or with latest, from the newest complete one.",
        nargs="?",
        const="latest",
    )

    # Generate
    max_prompt_length: int | None = option(
        None,
        "Leave out rows whose prompt has more tokens than this, image tokens included; nothing is truncated. None: no "
        "limit.",
    )

    share_prompts: Annotated[str, one_of("auto", "on", "off")] = option(
        "auto",
        "Compute each prompt once for its completions, in generation, scoring and training. auto: wherever that "
        "changes nothing; on: also where bringing the completions of a prompt into one micro-batch changes a "
        "normaliser of the loss; off.",
    )

    vision_cache_megabytes: Natural = option(
        1024,
        "Compute the features of an image once per rollout, for generation, scoring and training, where the vision "
        "tower is frozen; as many MiB of them are kept. 0: in every pass.",
    )

    # Judge
    warmup_ratio: float | None = option(None, "Share of all steps that warm the learning rate up, in [0, 1).")
    early_reward_weights: list[float] | None = option(
        None,
        "Reward weights during the warm-up steps (without warm-up: the first tenth of all steps), in the order of the "
        "reward functions; reward_weights hold afterwards.",
    )
    vgr_hard_negative: Switch = option(False, "Give the reward vgr to right completions only.")
    attention_reward_scale: Annotated[str, one_of("none", "accuracy")] = option(
        "none",
        "accuracy: the rewards vgr, vgr_hard_negative and mdi count as far as the completions of a prompt differ in "
        "accuracy, not where all or none are right; none: everywhere alike.",
    )
    soft_punish_cache: int | None = option(
        None,
        "Tokens before max_completion_length over which the length reward falls from 0 to -1; None: a fifth of it.",
    )

    stop_on_collapse: Switch = option(
        False,
        "End at the first sign of collapse (accuracy, format or length fallen, entropy at 0 or soaring, groups with "
        "equal rewards) instead of a warning.",
    )

    reward_timeout: Annotated[float | None, in_range(SMALLEST, LARGEST, "of seconds above 0, or None")] = option(
        None,
        "Seconds that a reward function may take for a batch, then it ends the run, by name. Not covered: asynchronous "
        "rewards, reward models, one call of C code that keeps the interpreter to itself (a regular expression), and "
        "loops that catch everything for ever. None: any number.",
    )

    def __post_init__(self) -> None:
        self._refuse_missing_deepspeed()
        self.resolve_aliases()
        self._resolve_words()
        self._resolve_warmup()
        check_options_of_trl(self)
        self._check_soft_punish_cache()
        check_values(self)
        self.check_perceive()
        self.check_noisy()
        self.check_blind()
        self.check_plugins()
        self.check_choose()
        self.check_report()
        self.check_evaluate()
        refuse_conflicts(self)
        super().__post_init__()

    @property
    def prompts_per_rollout(self) -> int:
        """Distinct prompts, over all processes, that one rollout generates completions for."""
        return int(self.generation_batch_size or 0) // int(self.num_generations or 1)

    @property
    def uses_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.advantage_estimator == "gae"

    @property
    def has_token_advantages(self) -> bool:
        """Whether the loss gets advantages (N, T)."""
        return self.shapes_advantages or self.uses_critic

    def _resolve_words(self) -> None:
        """Take True and False, as which YAML reads on and off, for these words."""
        words = {True: "on", False: "off"}
        for name in ("share_prompts", *SWITCHES):
            if isinstance(value := getattr(self, name), bool):
                setattr(self, name, words[value])

    def _resolve_warmup(self) -> None:
        if self.warmup_ratio is not None:
            if not is_number(self.warmup_ratio) or not 0 <= self.warmup_ratio < 1:
                raise ConfigError(f"warmup_ratio is {self.warmup_ratio}: give a share of all steps in [0, 1).")
            if self.warmup_steps not in (0, self.warmup_ratio):
                raise ConfigError(
                    f"warmup_ratio is {self.warmup_ratio} and warmup_steps is {self.warmup_steps}: give one of them."
                )
            self.warmup_steps = self.warmup_ratio

    def _refuse_missing_deepspeed(self) -> None:
        launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if (self.deepspeed or launched) and find_spec("deepspeed") is None:
            raise ConfigError(
                f"{'deepspeed is given' if self.deepspeed else 'the launcher asks for DeepSpeed'}, which is not "
                'installed: pip install "vgr_trl[deepspeed]", or start with accelerate_configs/multi_gpu.yaml.'
            )

    def _check_soft_punish_cache(self) -> None:
        tokens, longest = self.soft_punish_cache, self.max_completion_length
        if tokens is None or (isinstance(tokens, Integral) and tokens >= 0 and (longest is None or tokens <= longest)):
            return
        raise ConfigError(
            f"soft_punish_cache is {tokens}: give a number of tokens in [0, max_completion_length = {longest}]."
        )
