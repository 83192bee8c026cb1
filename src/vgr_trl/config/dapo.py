"""Every option of the trainer, grouped by the stage that it steers."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Integral
from typing import Annotated

from trl import GRPOConfig

from vgr_trl.config import (
    AliasOptions,
    BlindOptions,
    ChooseOptions,
    CreditOptions,
    CriticOptions,
    EvaluateOptions,
    KLOptions,
    MeasureOptions,
    NoisyOptions,
    PerceiveOptions,
    PluginOptions,
    ReportOptions,
    SkipOptions,
)
from vgr_trl.config.option import option
from vgr_trl.config.ranges import (
    Natural,
    Switch,
    check_options_of_trl,
    check_values,
    is_number,
    one_of,
)
from vgr_trl.config.stages.skip import SWITCHES
from vgr_trl.errors import ConfigError

_RATIO_LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "sapo", "luspo")
_LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


@dataclass
class DAPOConfig(
    AliasOptions,
    ReportOptions,
    EvaluateOptions,
    SkipOptions,
    ChooseOptions,
    CreditOptions,
    CriticOptions,
    KLOptions,
    BlindOptions,
    NoisyOptions,
    PerceiveOptions,
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
        "tower gets no gradient; as many MiB of them are kept. 0: in every pass.",
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

    reward_timeout: float | None = option(
        None,
        "Seconds that a reward function may take for a batch, then it ends the run, by name (not asynchronous rewards "
        "and reward models). None: any number.",
    )

    def __post_init__(self) -> None:
        self._refuse_missing_deepspeed()
        self.resolve_aliases()
        self._resolve_words()
        self._resolve_warmup()
        self._check_ranges()
        check_values(self)
        self.check_perceive()
        self.check_noisy()
        self.check_blind()
        self.check_plugins()
        self.check_choose()
        self.check_report()
        self.check_evaluate()
        self._refuse_ignored_credit()
        self._refuse_two_kinds_of_kl()
        self._refuse_unfit_critic()
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

    def _refuse_ignored_credit(self) -> None:
        differs = self.shapes_tokens or self.uses_critic
        if self.importance_sampling_level == "sequence" and differs and self.loss_type in _RATIO_LOSSES:
            raise ConfigError(
                f"importance_sampling_level is sequence with loss_type {self.loss_type}: the gradient would ignore "
                "token weights and filters, and what a critic says of tokens, so use importance_sampling_level token, "
                "or loss_type cispo or vespo."
            )

    def _refuse_unfit_critic(self) -> None:
        if not self.uses_critic:
            return
        if self.critic_warmup > 0 and self.weight_decay > 0:
            raise ConfigError(
                f"critic_warmup is {self.critic_warmup} and weight_decay is {self.weight_decay}, which would move the "
                "policy meanwhile: give weight_decay 0, or no critic_warmup."
            )
        if self.torch_compile:
            raise ConfigError(
                "advantage_estimator is gae with torch_compile, which hides what a critic reads: drop one."
            )

    def _refuse_two_kinds_of_kl(self) -> None:
        if self.kl_coef > 0 and self.beta > 0:
            raise ConfigError(
                f"kl_coef is {self.kl_coef} and beta is {self.beta}: give kl_coef, or beta (low_var_kl in the loss, as "
                "TRL has it)."
            )
        if self.penalises_kl and self.multi_objective_aggregation != "sum_then_normalize":
            raise ConfigError(
                f"multi_objective_aggregation is {self.multi_objective_aggregation} with a KL in the rewards, which it "
                "would divide by its deviation: use sum_then_normalize, or use_kl_loss."
            )

    def _check_ranges(self) -> None:
        check_options_of_trl(self)
        if self.reward_timeout is not None and not (is_number(self.reward_timeout) and self.reward_timeout > 0):
            raise ConfigError(f"reward_timeout is {self.reward_timeout!r}: give a number of seconds above 0, or None.")
        if self.output_dir is not None and not str(self.output_dir).strip():
            raise ConfigError("output_dir is empty: give a folder, or leave it out.")
        if self.temperature == 0:
            raise ConfigError(f"temperature is {self.temperature}: give a number above 0.")
        highest = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.delta <= highest:
            raise ConfigError(
                f"delta (clip_ratio_dual) is {self.delta}, which would clip ratios of up to {highest:g}, those of "
                "tokens with positive advantage too: give a number above 1 + epsilon_high, such as 3.0."
            )
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ConfigError(
                f"max_steps is {self.max_steps} and num_train_epochs {self.num_train_epochs}, so nothing would be "
                "trained: give max_steps of at least 1, or more epochs."
            )
        self._check_soft_punish_cache()

    def _check_soft_punish_cache(self) -> None:
        tokens, longest = self.soft_punish_cache, self.max_completion_length
        if tokens is None or (isinstance(tokens, Integral) and tokens >= 0 and (longest is None or tokens <= longest)):
            return
        raise ConfigError(
            f"soft_punish_cache is {tokens}: give a number of tokens in [0, max_completion_length = {longest}]."
        )
