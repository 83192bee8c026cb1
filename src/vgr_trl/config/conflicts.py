"""Options of different stages that do not go together."""

from typing import TYPE_CHECKING

from vgr_trl.errors import ConfigError

if TYPE_CHECKING:
    from vgr_trl.config.dapo import DAPOConfig

_RATIO_LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "sapo", "luspo")


def refuse_conflicts(options: "DAPOConfig") -> None:
    """Raise `ConfigError` for the first two that would undo one another, or of which one would be ignored."""
    _refuse_ignored_credit(options)
    _refuse_two_kinds_of_kl(options)
    _refuse_unfit_critic(options)


def _refuse_ignored_credit(options: "DAPOConfig") -> None:
    differs = options.shapes_tokens or options.uses_critic
    if options.importance_sampling_level == "sequence" and differs and options.loss_type in _RATIO_LOSSES:
        raise ConfigError(
            f"importance_sampling_level is sequence with loss_type {options.loss_type}: the gradient would ignore "
            "token weights and filters, and what a critic says of tokens, so use importance_sampling_level token, "
            "or loss_type cispo or vespo."
        )


def _refuse_unfit_critic(options: "DAPOConfig") -> None:
    if not options.uses_critic:
        return
    if options.critic_warmup > 0 and options.weight_decay > 0:
        raise ConfigError(
            f"critic_warmup is {options.critic_warmup} and weight_decay is {options.weight_decay}, which would move "
            "the policy meanwhile: give weight_decay 0, or no critic_warmup."
        )
    if options.torch_compile:
        raise ConfigError("advantage_estimator is gae with torch_compile, which hides what a critic reads: drop one.")


def _refuse_two_kinds_of_kl(options: "DAPOConfig") -> None:
    if options.kl_coef > 0 and options.beta > 0:
        raise ConfigError(
            f"kl_coef is {options.kl_coef} and beta is {options.beta}: give kl_coef, or beta (low_var_kl in the loss, "
            "as TRL has it)."
        )
    if options.penalises_kl and options.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError(
            f"multi_objective_aggregation is {options.multi_objective_aggregation} with a KL in the rewards, which it "
            "would divide by its deviation: use sum_then_normalize, or use_kl_loss."
        )
