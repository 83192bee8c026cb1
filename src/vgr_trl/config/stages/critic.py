"""Options of the critic, whose values are what `advantage_estimator gae` compares with."""

from dataclasses import dataclass

from vgr_trl.config.option import option
from vgr_trl.config.ranges import check_choice, check_integer, check_number

LEARNING_RATES = {"head": 1e-3, "model": 1e-5}


@dataclass
class CriticOptions:
    """How the values of tokens are learned and what becomes of them."""

    gamma: float = option(1.0, "Discount of advantage_estimator gae, in [0, 1].")
    lam: float = option(1.0, "Lambda of advantage_estimator gae, in [0, 1].")
    critic: str = option(
        "head",
        "head: on the policy's last hidden states, which it does not train; model: a copy of the policy with a scalar "
        "head, of which those parameters are trained that the policy trains.",
    )
    critic_learning_rate: float | None = option(
        None, "Learning rate of the critic. None: 1e-3 for a head, 1e-5 for a model."
    )
    critic_warmup_steps: int = option(0, "Steps over which the critic's learning rate rises from 0.")
    critic_warmup: int = option(0, "Steps in the beginning in which only the critic is trained.")
    cliprange_value: float = option(
        0.5, "How far a value may move from that of the rollout before its loss stops following."
    )

    def check_critic(self) -> None:
        """Raise `ConfigError` for values out of range."""
        check_number("gamma", self.gamma, 0, 1, "in [0, 1]")
        check_number("lam", self.lam, 0, 1, "in [0, 1]")
        check_choice("critic", self.critic, tuple(LEARNING_RATES))
        if self.critic_learning_rate is not None:
            check_number("critic_learning_rate", self.critic_learning_rate, 1e-30, 1e30, "above 0")
        check_integer("critic_warmup_steps", self.critic_warmup_steps, 0)
        check_integer("critic_warmup", self.critic_warmup, 0)
        check_number("cliprange_value", self.cliprange_value, 1e-30, 1e30, "above 0")
