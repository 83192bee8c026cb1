"""What a trainer leaves of its rollouts for people to look at: records, Markdown logs, lines on the terminal."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from vgr_trl.config.stages.report import LOG_OPTIONS
from vgr_trl.errors import ConfigError
from vgr_trl.reporting.records.record import LogEntry, Record
from vgr_trl.reporting.records.record_files import refuse_unwritable
from vgr_trl.reporting.records.recorded_run import FOLDER
from vgr_trl.reporting.sink import Finished, RecordSink
from vgr_trl.reporting.views.markdown.logs import markdown_logs
from vgr_trl.signals import Measurement
from vgr_trl.training.host import Host
from vgr_trl.training.recording.recorded_rows import Completing, OwnDecoder, rows_to_record, summary_of
from vgr_trl.training.recording.taking import TakenRows, take_rows, with_pictures
from vgr_trl.training.rollout import Rollout


def finished(
    record: Record, taken: list[TakenRows], completing: Completing, rewards: torch.Tensor, metrics: dict[str, float]
) -> Finished:
    """Return a record with its completions and thumbnails, and the batch in numbers; needs no trainer.

    Args:
        record: without completions.
    """
    rows = sorted((row for of_process in taken for row in completing.rows(of_process)), key=lambda row: row.place)
    record.completions = [row.completion for row in rows]
    summary = summary_of(rewards, completing.reward_names, torch.tensor(completing.reward_weights), metrics)
    return Finished(record, [row.thumbnails for row in rows], summary)


class RolloutRecorder:
    """Records a few completions of rollouts, in a thread of the main process.

    Every process takes part in what is gathered, at the same steps.

    Raises:
        ConfigError: a file or folder cannot be written, or a log is asked for that nothing is measured for.
    """

    def __init__(self, host: Host, measurement: Measurement, model: str) -> None:
        self.host, self.args, self.measurement = host, host.args, measurement
        self.is_on = self.args.rollout_log_steps > 0
        self._last: dict[str, int | None] = {"train": None, "eval": None}
        self._merge_size = getattr(getattr(host.processor, "image_processor", None), "merge_size", None)
        self._decode = OwnDecoder(host.tokenizer)
        if self.is_on:
            self._refuse()
        self.sink = RecordSink(
            Path(str(self.args.output_dir)),
            self._description(model),
            int(self.args.rollout_log_max_megabytes * 1e6),
            logs=markdown_logs(self.args, time.strftime("%Y%m%d_%H%M%S"), attention=bool(measurement.wanted.attention)),
            at_once=self.args.realtime_rollout_logging,
            prints=self.args.colorize_output,
            print_length=self.args.prompt_preview_length,
        )

    def _refuse(self) -> None:
        args = self.args
        if args.attention_diag_log_path is not None and not self.measurement.wanted.attention:
            raise ConfigError(
                f"attention_diag_log_path is {args.attention_diag_log_path}, but no attention is measured in this run: "
                "switch compute_attention_metrics on, or leave it out."
            )
        if args.token_weights_log_path is not None and not args.token_weights:
            raise ConfigError(
                f"token_weights_log_path is {args.token_weights_log_path}, but token_weights is off: switch it on, or "
                "leave it out."
            )
        if self.host.accelerator.is_main_process:
            refuse_unwritable(Path(str(args.output_dir)) / FOLDER, "output_dir", is_folder=True)
            for name in LOG_OPTIONS:
                if (path := getattr(args, name)) is not None:
                    refuse_unwritable(Path(path), name)

    # A rollout batch, in the order of events

    def rows_due(self, rows: int) -> tuple[int, ...] | None:
        """Return which rows of this process are recorded of a rollout that begins; None if none is in any process.

        Args:
            rows: completions of each process.
        """
        mode, host = self.host.mode, self.host
        if not self._is_due(mode):
            return None
        self._last[mode] = host.state.global_step
        first, total = host.accelerator.process_index * rows, rows * host.accelerator.num_processes
        chosen = rows_to_record(self.args.rollout_log_samples, host.num_generations, total)
        return tuple(row - first for row in chosen if first <= row < first + rows)

    def _is_due(self, mode: str) -> bool:
        if not self.is_on:
            return False
        last, step, every = self._last[mode], self.host.state.global_step, self.args.rollout_log_steps
        if mode == "eval":
            return last is None  # the first batch of each evaluation
        return last is None or step // every != last // every

    def keep(self, rollout: Rollout) -> TakenRows:
        """Return the recorded rows of a judged rollout, before groups are replaced and credit is spread."""
        first = self.host.accelerator.process_index * len(rollout.rows)
        pad = self.host.tokenizer.pad_token_id
        return take_rows(rollout, first, self.host.num_generations, pad, self._merge_size)

    def write(self, rollout: Rollout, taken: TakenRows) -> None:
        """Gather the recorded rows of a rollout, and let the main process write them; every process calls."""
        if rollout.recorded is None:
            return
        host, gathered = self.host, [taken]
        if host.accelerator.num_processes > 1:
            gathered = gather_object([with_pictures(taken)])
        if not host.accelerator.is_main_process:
            return
        assert rollout.rewards is not None
        completing = Completing(
            self._decode,
            self.measurement.vision_token_ids,
            self.args,
            list(host.reward_names),
            host.reward_weights.tolist(),
        )
        record = Record(host.state.global_step, host.mode, time.time(), [])
        rewards = rollout.rewards.detach().clone().cpu()
        self.sink.add(partial(finished, record, gathered, completing, rewards, host.newest_metrics()))

    def _description(self, model: str) -> dict[str, Any]:
        return {
            "name": self.args.run_name or Path(str(self.args.output_dir)).resolve().name,
            "rewards": list(self.host.reward_names),
            "model": model,
            "options": self.args.to_sanitized_dict(),
        }

    # Beside the rollouts

    def log(self, logs: dict[str, Any], mode: str) -> None:
        """Record what the trainer has logged."""
        if not self.is_on or not self.host.accelerator.is_main_process:
            return
        values: dict[str, float | None] = {
            name: float(value) for name, value in logs.items() if isinstance(value, (int, float))
        }
        self.sink.log(LogEntry(self.host.state.global_step, mode, time.time(), values))

    def evaluated(self) -> None:
        """An evaluation is over: the next one is recorded again."""
        self._last["eval"] = None


class FlushRecords(TrainerCallback):
    """Lets nothing be lost that was recorded before a checkpoint, or before the end."""

    def __init__(self, recorder: RolloutRecorder) -> None:
        self.recorder = recorder

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Begin anew."""
        self.recorder.evaluated()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Write what waits."""
        self.recorder.sink.flush()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Write what waits, and end the thread."""
        self.recorder.sink.close()
