"""Options of the advantages, and of the groups that are trained on."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import (
    Natural,
    PositiveInt,
    Switch,
    Weight,
    at_least,
    check_number,
    in_range,
    is_number,
    one_of,
)
from vgr_trl.errors import ConfigError

ESTIMATORS = ("grpo", "rloo", "remax", "reinforce_plus_plus", "grpo_passk", "gae")


@dataclass
class ChooseOptions:
    """How completions of a prompt are compared, and what happens to groups without a gradient (dead groups)."""

    advantage_estimator: Annotated[str, one_of(*ESTIMATORS)] = option(
        "grpo", f"How completions of a prompt are compared: {', '.join(ESTIMATORS)}."
    )
    replay_buffer_size: Natural = option(0, "Groups kept to replace groups without a gradient; 0: none.")
    replay_var_epsilon: Weight = option(
        1e-6, "Largest |advantage| (grpo: standard deviation of the rewards) of a group without a gradient."
    )
    filter_min_reward: Annotated[float | None, in_range(-1e30, 1e30, "that is finite")] = option(
        None, "Mean reward that a group needs to enter the replay buffer. None: any."
    )
    replay_max_age: Annotated[int | None, at_least(1)] = option(
        None, "Steps after which a group leaves the replay buffer. None: never."
    )
    dynamic_sampling: Annotated[str | None, one_of(None, "resample")] = option(
        None, "resample: draw further prompts while groups have no gradient. None: do not."
    )
    dynamic_sampling_max_rounds: PositiveInt = option(3, "How often further prompts are drawn for a batch, at most.")
    online_filtering: Switch = option(
        False, "Drop groups whose mean of filter_key lies outside (filter_low, filter_high)."
    )
    filter_key: str = option(
        "accuracy",
        "Reward function, or a part of its name (accuracy for accuracy_reward), whose unweighted values online "
        "filtering looks at; or overall, the weighted sum of all.",
    )
    filter_mode: Annotated[str, one_of("bounds", "quantile")] = option(
        "bounds", "bounds: filter_low and filter_high are values of filter_key; quantile: of the rollout's groups."
    )
    filter_low: float = option(0.01, "Lower bound of online filtering, exclusive; or quantile, inclusive.")
    filter_high: float = option(0.99, "Upper bound of online filtering; the default fits rewards from 0 to 1.")

    @property
    def chooses_groups(self) -> bool:
        """Whether groups can be replaced."""
        return self.replay_buffer_size > 0 or self.dynamic_sampling is not None or self.online_filtering

    def check_choose(self) -> None:
        """Raise `ConfigError` for bounds out of range, and for groups that could not be replaced."""
        if self.filter_mode == "quantile":
            check_number("filter_low", self.filter_low, 0, 1, "in [0, 1], a quantile")
            check_number("filter_high", self.filter_high, 0, 1, "in [0, 1], a quantile")
        if self.advantage_estimator == "gae" and self.replay_buffer_size > 0:
            raise ConfigError(
                f"advantage_estimator is gae with replay_buffer_size {self.replay_buffer_size}, whose groups would "
                "keep advantages of an earlier critic: drop the buffer, or use another estimator."
            )
        if not (is_number(self.filter_low) and is_number(self.filter_high) and self.filter_low < self.filter_high):
            raise ConfigError(
                f"filter_low is {self.filter_low!r} and filter_high is {self.filter_high!r}: give two numbers with "
                "filter_low < filter_high."
            )
