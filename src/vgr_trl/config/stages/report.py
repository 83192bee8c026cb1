"""Options of what is recorded of a run, and of the logs that people read."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import Natural, PositiveInt, Switch, at_least, in_range, one_of
from vgr_trl.errors import ConfigError

LOG_OPTIONS = ("rollout_log_path", "eval_log_path", "attention_diag_log_path", "token_weights_log_path")


@dataclass
class ReportOptions:
    """What is recorded of the rollouts, for `vgr-trl report` and for the eye."""

    rollout_log_steps: Natural = option(
        10,
        "Record completions in output_dir/rollouts at the first rollout of every so many steps and at each evaluation; "
        "0: never.",
    )
    rollout_log_samples: PositiveInt = option(4, "Completions per record: the first two of each prompt.")
    rollout_log_max_megabytes: Annotated[float, in_range(1, 1e9, "of at least 1")] = option(
        512,
        "Bound of records and thumbnails, whose oldest but the first ones go beyond it; of the tables of "
        "log_completions likewise; of rollouts/logs.jsonl, of which every second entry goes then; and of each Markdown "
        "file, to which nothing is added.",
    )
    markdown_logs: Switch = option(
        True, "Write the recorded completions, with their token weights, as Markdown to output_dir/training_logs too."
    )
    rollout_log_path: str | None = option(None, "Another Markdown file for the recorded completions of training.")
    eval_log_path: str | None = option(None, "Another Markdown file for the recorded completions of evaluations.")
    attention_diag_log_path: str | None = option(
        None, "Another Markdown file for the attention of the recorded completions, by segment of layers."
    )
    token_weights_log_path: str | None = option(None, "Markdown file for token weights, for instance token_weights.md.")
    realtime_rollout_logging: bool = option(
        False, "Append to the Markdown files as soon as a rollout is judged, not when the trainer logs."
    )
    prompt_preview_length: Annotated[int | None, at_least(1)] = option(
        600, "Characters of a prompt in the Markdown files. None: all."
    )
    completion_preview_length: Annotated[int | None, at_least(1)] = option(
        2000, "Characters of a completion in the Markdown files. None: all."
    )
    metric_names: Annotated[str, one_of("trl", "verl")] = option(
        "trl", "Names of metrics in trackers (wandb, TensorBoard, …): trl or verl."
    )
    colorize_output: bool = option(False, "Print the recorded completions on the terminal, with coloured tokens.")

    def check_report(self) -> None:
        """Raise `ConfigError` for logs that nothing would be written to."""
        given = {name: getattr(self, name) for name in LOG_OPTIONS if getattr(self, name) is not None}
        for name, path in given.items():
            if not isinstance(path, str) or not path.strip():
                raise ConfigError(f"{name} is {path!r}: give the path of a Markdown file, or leave it out.")
        wanting = [*given, *(["colorize_output"] if self.colorize_output else [])]
        if wanting and self.rollout_log_steps == 0:
            raise ConfigError(
                f"{wanting[0]} is given, but rollout_log_steps is 0, so nothing is recorded: give rollout_log_steps of "
                "at least 1."
            )
        if len(set(given.values())) < len(given):
            raise ConfigError(
                f"{' and '.join(given)} name the same file ({', '.join(given.values())}): give each a file of its own."
            )
