"""Options of the critic, whose values are what `advantage_estimator gae` compares with."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import Natural, Positive, Share, in_range, one_of

LEARNING_RATES = {"head": 1e-3, "model": 1e-5}


@dataclass
class CriticOptions:
    """How the values of tokens are learned and what becomes of them."""

    gamma: Share = option(1.0, "Discount of advantage_estimator gae, in [0, 1].")
    lam: Share = option(1.0, "Lambda of advantage_estimator gae, in [0, 1].")
    critic: Annotated[str, one_of(*LEARNING_RATES)] = option(
        "head",
        "head: on the policy's last hidden states, which it does not train; model: a copy of the policy with a scalar "
        "head, of which those parameters are trained that the policy trains.",
    )
    critic_learning_rate: Annotated[float | None, in_range(1e-30, 1e30, "above 0")] = option(
        None, "Learning rate of the critic. None: 1e-3 for a head, 1e-5 for a model."
    )
    critic_warmup_steps: Natural = option(0, "Steps over which the critic's learning rate rises from 0.")
    critic_warmup: Natural = option(0, "Steps in the beginning in which only the critic is trained.")
    cliprange_value: Positive = option(
        0.5, "How far a value may move from that of the rollout before its loss stops following."
    )
