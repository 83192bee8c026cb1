"""Other names of options, those of our users' scripts, in one place."""

from dataclasses import dataclass
from typing import Any

from vgr_trl.config.option import option
from vgr_trl.config.ranges import check_choice
from vgr_trl.errors import ConfigError

ALIASES = {
    "eval_num_generations": "num_generations_eval",
    "prompt_preview_chars": "prompt_preview_length",
    "completion_preview_chars": "completion_preview_length",
    "out_dir": "output_dir",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_dual": "delta",
    "late_reward_weights": "reward_weights",
}
LOSS_AVERAGES = {"token": "dapo", "sequence": "grpo", "seq": "grpo"}  # of `loss_avg_mode` -> `loss_type`


@dataclass
class AliasOptions:
    """Each option means the one that `ALIASES` names, and `loss_avg_mode` one of two loss types; None: that one is left
    as it is."""

    eval_num_generations: int | None = option(None, "Alias of num_generations_eval.")
    prompt_preview_chars: int | None = option(None, "Alias of prompt_preview_length.")
    completion_preview_chars: int | None = option(None, "Alias of completion_preview_length.")
    out_dir: str | None = option(None, "Alias of output_dir.")
    clip_ratio_low: float | None = option(None, "Alias of epsilon.")
    clip_ratio_high: float | None = option(None, "Alias of epsilon_high.")
    clip_ratio_dual: float | None = option(
        None, "Alias of delta: largest ratio of a token with negative advantage (dual clip), often 3.0."
    )
    loss_avg_mode: str | None = option(
        None, "token: loss_type dapo, the mean over all tokens; sequence (or seq): loss_type grpo."
    )
    late_reward_weights: list[float] | None = option(None, "Alias of reward_weights.")
    use_segmented_reward_weights: bool = option(
        False, "Of no effect: early_reward_weights hold at first wherever they are given."
    )

    def resolve_aliases(self) -> None:
        """Set the options that aliases stand for, or raise `ConfigError` where both are given and differ."""
        options: dict[str, Any] = type(self).__dataclass_fields__
        for alias, name in ALIASES.items():
            given, before = getattr(self, alias), getattr(self, name)
            if given is None:
                continue
            if before not in (given, options[name].default):
                raise ConfigError(
                    f"{alias} is {given} and {name}, of which it is an alias, is {before}: give one of them, or the "
                    "same value twice."
                )
            setattr(self, name, given)
        if self.loss_avg_mode is not None:
            self._resolve_loss_average(self.loss_avg_mode)
        if self.use_segmented_reward_weights and getattr(self, "early_reward_weights", None) is None:
            raise ConfigError(
                "use_segmented_reward_weights is given without weights for the beginning: add early_reward_weights, or "
                "leave it out."
            )

    def _resolve_loss_average(self, mode: str) -> None:
        check_choice("loss_avg_mode", mode, tuple(LOSS_AVERAGES))
        options: dict[str, Any] = type(self).__dataclass_fields__
        given = getattr(self, "loss_type", None)
        if given not in (LOSS_AVERAGES[mode], options["loss_type"].default):
            raise ConfigError(
                f"loss_avg_mode is {mode}, which means loss_type {LOSS_AVERAGES[mode]}, and loss_type is {given}: give "
                "one of them."
            )
        self.loss_type = LOSS_AVERAGES[mode]
