"""Options of the evaluations of a run."""

from dataclasses import dataclass

from vgr_trl.config.option import option
from vgr_trl.config.ranges import check_number
from vgr_trl.errors import ConfigError


@dataclass
class EvaluateOptions:
    """How completions are sampled in evaluations, where that differs from training.

    Log-probabilities are those of `temperature` all the same.
    """

    eval_temperature: float | None = option(None, "Sampling temperature in evaluations, 0: greedy. None: temperature.")
    eval_top_p: float | None = option(None, "top_p in evaluations, in (0, 1]. None: top_p.")

    def check_evaluate(self) -> None:
        """Raise `ConfigError` for values out of range."""
        if self.eval_temperature is not None:
            check_number("eval_temperature", self.eval_temperature, 0, 1e30, "of at least 0")
        if self.eval_top_p is not None:
            check_number("eval_top_p", self.eval_top_p, 1e-9, 1, "in (0, 1]")
        every = [getattr(self, name, None) for name in ("num_generations_eval", "num_generations")]
        completions = next((count for count in every if count), 1)
        if self.eval_temperature == 0 and completions > 1:
            raise ConfigError(
                f"eval_temperature is 0 with {completions} completions per prompt in evaluations, which would be "
                "alike: give num_generations_eval 1."
            )
