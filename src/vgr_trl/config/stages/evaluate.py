"""Options of the evaluations of a run."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import in_range
from vgr_trl.errors import ConfigError


@dataclass
class EvaluateOptions:
    """How completions are sampled in evaluations, where that differs from training.

    Log-probabilities are those of `temperature` all the same.
    """

    eval_temperature: Annotated[float | None, in_range(0, 1e30, "of at least 0")] = option(
        None, "Sampling temperature in evaluations, 0: greedy. None: temperature."
    )
    eval_top_p: Annotated[float | None, in_range(1e-9, 1, "in (0, 1]")] = option(
        None, "top_p in evaluations, in (0, 1]. None: top_p."
    )

    def check_evaluate(self) -> None:
        """Raise `ConfigError` where the completions of a prompt would be alike."""
        every = [getattr(self, name, None) for name in ("num_generations_eval", "num_generations")]
        completions = next((count for count in every if count), 1)
        if self.eval_temperature == 0 and completions > 1:
            raise ConfigError(
                f"eval_temperature is 0 with {completions} completions per prompt in evaluations, which would be "
                "alike: give num_generations_eval 1."
            )
