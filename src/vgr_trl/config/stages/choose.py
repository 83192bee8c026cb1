"""Options of the advantages, and of the groups that are trained on."""

from dataclasses import dataclass

from vgr_trl.config.option import option
from vgr_trl.config.ranges import check_choice, check_integer, check_number, check_switch, is_number
from vgr_trl.errors import ConfigError

ESTIMATORS = ("grpo", "rloo", "remax", "reinforce_plus_plus", "grpo_passk", "gae")


@dataclass
class ChooseOptions:
    """How completions of a prompt are compared, and what happens to groups without a gradient (dead groups)."""

    advantage_estimator: str = option("grpo", f"How completions of a prompt are compared: {', '.join(ESTIMATORS)}.")
    replay_buffer_size: int = option(0, "Groups kept to replace groups without a gradient; 0: none.")
    replay_var_epsilon: float = option(
        1e-6, "Largest |advantage| (grpo: standard deviation of the rewards) of a group without a gradient."
    )
    filter_min_reward: float | None = option(
        None, "Mean reward that a group needs to enter the replay buffer. None: any."
    )
    replay_max_age: int | None = option(None, "Steps after which a group leaves the replay buffer. None: never.")
    dynamic_sampling: str | None = option(
        None, "resample: draw further prompts while groups have no gradient. None: do not."
    )
    dynamic_sampling_max_rounds: int = option(3, "How often further prompts are drawn for a batch, at most.")
    online_filtering: bool = option(
        False, "Drop groups whose mean of filter_key lies outside (filter_low, filter_high)."
    )
    filter_key: str = option(
        "accuracy",
        "Reward function, or a part of its name (accuracy for accuracy_reward), whose unweighted values online "
        "filtering looks at; or overall, the weighted sum of all.",
    )
    filter_mode: str = option(
        "bounds", "bounds: filter_low and filter_high are values of filter_key; quantile: of the rollout's groups."
    )
    filter_low: float = option(0.01, "Lower bound of online filtering, exclusive; or quantile, inclusive.")
    filter_high: float = option(0.99, "Upper bound of online filtering; the default fits rewards from 0 to 1.")

    @property
    def chooses_groups(self) -> bool:
        """Whether groups can be replaced."""
        return self.replay_buffer_size > 0 or self.dynamic_sampling is not None or self.online_filtering

    def check_choose(self) -> None:
        """Raise `ConfigError` for values out of range."""
        check_choice("advantage_estimator", self.advantage_estimator, ESTIMATORS)
        check_choice("dynamic_sampling", self.dynamic_sampling, (None, "resample"))
        check_switch("online_filtering", self.online_filtering)
        check_integer("replay_buffer_size", self.replay_buffer_size, 0)
        check_number("replay_var_epsilon", self.replay_var_epsilon, 0, 1e30, "of at least 0")
        check_integer("dynamic_sampling_max_rounds", self.dynamic_sampling_max_rounds, 1)
        if self.replay_max_age is not None:
            check_integer("replay_max_age", self.replay_max_age, 1)
        if self.filter_min_reward is not None:
            check_number("filter_min_reward", self.filter_min_reward, -1e30, 1e30, "that is finite")
        check_choice("filter_mode", self.filter_mode, ("bounds", "quantile"))
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
