"""What a trainer leaves of its rollouts for people to look at: records, Markdown logs, lines on the terminal."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from vgr_trl.config.report import LOG_OPTIONS
from vgr_trl.errors import ConfigError
from vgr_trl.reporting.records.format import Completion, LogEntry, Record
from vgr_trl.reporting.records.reading import FOLDER
from vgr_trl.reporting.records.writing import refuse_unwritable
from vgr_trl.reporting.sink import RecordSink
from vgr_trl.reporting.views.markdown_logs import markdown_logs
from vgr_trl.training.record_before import RecordBefore
from vgr_trl.training.recorded_images import grids_of_row, images_of_row, quantised
from vgr_trl.training.recorded_rows import (
    RecordedRow,
    accuracy_name,
    measures_of_row,
    of_rewards,
    question_id,
    rows_to_record,
    signals_of_row,
    summary_of,
    texts_of_row,
)


@dataclass
class _Rollout:
    """A rollout batch that is recorded."""

    step: int
    mode: str
    rows: list[int]  # of this process
    recorded: list[RecordedRow] = field(default_factory=list)
    rewards: torch.Tensor | None = None  # (N of all, number of functions), unweighted


class RolloutRecorder:
    """Records a few completions of a trainer's rollouts, in a thread of the main process.

    Every process takes part in what is gathered, at the same steps.

    Args:
        trainer: a constructed `DAPOTrainer`.

    Raises:
        ConfigError: a file or folder cannot be written, or a log is asked for that nothing is measured for.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.is_on = self.args.rollout_log_steps > 0
        self._last: dict[str, int | None] = {"train": None, "eval": None}
        self._rollout: _Rollout | None = None
        processor = trainer.processing_class
        self._merge_size = getattr(getattr(processor, "image_processor", None), "merge_size", None)
        if self.is_on:
            self._refuse()
            trainer.add_callback(_Flushing(self))
            trainer.add_callback(RecordBefore(trainer))
        self.sink = RecordSink(
            Path(self.args.output_dir),
            self._description(),
            int(self.args.rollout_log_max_megabytes * 1e6),
            logs=markdown_logs(
                self.args, time.strftime("%Y%m%d_%H%M%S"), attention=bool(trainer._measurement.wanted.attention)
            ),
            at_once=self.args.realtime_rollout_logging,
            prints=self.args.colorize_output,
            print_length=self.args.prompt_preview_length,
        )

    def _refuse(self) -> None:
        args = self.args
        if args.attention_diag_log_path is not None and not self.trainer._measurement.wanted.attention:
            raise ConfigError(
                f"attention_diag_log_path is {args.attention_diag_log_path}, but no attention is measured in this run: "
                "switch compute_attention_metrics on, or leave it out."
            )
        if args.token_weights_log_path is not None and not args.token_weights:
            raise ConfigError(
                f"token_weights_log_path is {args.token_weights_log_path}, but token_weights is off: switch it on, or "
                "leave it out."
            )
        if self.trainer.accelerator.is_main_process:
            refuse_unwritable(Path(args.output_dir) / FOLDER, "output_dir", is_folder=True)
            for name in LOG_OPTIONS:
                if (path := getattr(args, name)) is not None:
                    refuse_unwritable(Path(path), name)

    # A rollout batch, in the order of events

    @contextmanager
    def rollout(self, rows: int) -> Iterator[None]:
        """A rollout batch of `rows` completions per process is made, judged and trained on in this block."""
        mode = "train" if self.trainer.model.training else "eval"
        if not self._is_due(mode):
            yield
            return
        accelerator = self.trainer.accelerator
        size = self.trainer._completions_per_prompt()
        first = accelerator.process_index * rows
        chosen = rows_to_record(self.args.rollout_log_samples, size, rows * accelerator.num_processes)
        here = [row - first for row in chosen if first <= row < first + rows]
        self._rollout = _Rollout(self.trainer.state.global_step, mode, here)
        self._last[mode] = self._rollout.step
        self.trainer._measurement.keep_rows = tuple(here)
        try:
            yield
            self._write(self._rollout)
        finally:
            self._rollout = None

    def _is_due(self, mode: str) -> bool:
        if not self.is_on:
            return False
        last, step, every = self._last[mode], self.trainer.state.global_step, self.args.rollout_log_steps
        if mode == "eval":
            return last is None  # the first batch of each evaluation
        return last is None or step // every != last // every

    def keep(self, batch: dict[str, Any]) -> None:
        """Keep the rows of the judged batch that are recorded, before groups are replaced and credit is spread."""
        rollout, trainer = self._rollout, self.trainer
        if rollout is None:
            return
        rollout.rewards = trainer._rewards_per_func
        offset = trainer.accelerator.process_index * len(batch["prompt_ids"])
        size = trainer._completions_per_prompt()
        for row in rollout.rows:
            rollout.recorded.append(self._row(batch, row, offset + row, size))

    def _row(self, batch: dict[str, Any], row: int, place: int, size: int) -> RecordedRow:
        trainer, measurement = self.trainer, self.trainer._measurement
        tokenizer = trainer._tokenizer
        texts = texts_of_row(batch, row, tokenizer.decode, tokenizer.pad_token_id, measurement.vision_token_ids)
        length = len(texts["tokens"])
        measured: dict[str, Any] = {}
        num_vision = None
        if measurement.signals is not None:
            signals = signals_of_row(measurement.signals, row)
            if signals.attention is not None:
                num_vision = int(signals.attention.num_vision[0])
            measured = measures_of_row(signals, length, self.args)
        grids = grids_of_row(batch, row, self._merge_size, num_vision)
        data = trainer._rollout_rows[row]
        images, thumbnails, digest = images_of_row(data, grids)
        if (attention := (measurement.maps or {}).get(row)) is not None:
            late = of_rewards(len(attention), self.args.attention_segments)
            measured["attention"] = quantised(attention[late].mean(0)[:length], grids)
        solution = data.get("solution")
        completion = Completion(
            question=question_id(texts["prompt"], digest),
            group=place // size,
            solution=None if solution is None else str(solution),
            advantage=float(batch["advantages"][row]),
            images=images,
            **texts,
            **measured,
            **self._rewards(place),
        )
        return RecordedRow(place, completion, thumbnails)

    def _rewards(self, place: int) -> dict[str, Any]:
        trainer = self.trainer
        earned = trainer._rewards_per_func[place]  # (number of functions,)
        rewards = dict(zip(trainer.reward_func_names, earned.tolist(), strict=True))
        right = rewards.get(accuracy_name(trainer.reward_func_names) or "")
        return {
            "rewards": rewards,
            "reward": float((earned * trainer.reward_weights.to(earned.device)).nansum()),
            "correct": None if right is None or math.isnan(right) else right == 1,
        }

    def trained_on(self, before: torch.Tensor, after: torch.Tensor, replaced: list[int]) -> None:
        """Keep what the loss reads of the recorded rows.

        Args:
            before: advantages (N,) of the groups chosen, before credit is spread.
            after: (N,) or (N, T), as the loss reads them.
            replaced: numbers of the groups that others have taken the place of.
        """
        if self._rollout is None:
            return
        for row, recorded in zip(self._rollout.rows, self._rollout.recorded, strict=True):
            completion = recorded.completion
            if completion.group in replaced:
                completion.replaced = True
                continue
            completion.advantage = float(before[row])
            length = len(completion.tokens)
            if completion.weights is not None and self.args.token_weights_positive_only and completion.advantage < 0:
                completion.weights = [1.0] * length
            credit = after[row].tolist()
            completion.advantages = credit[:length] if isinstance(credit, list) else [credit] * length

    def _write(self, rollout: _Rollout) -> None:
        """Gather the rows and let the main process write them."""
        gathered = gather_object(rollout.recorded)
        if not self.trainer.accelerator.is_main_process:
            return
        rows = sorted(gathered, key=lambda row: row.place)
        record = Record(rollout.step, rollout.mode, time.time(), [row.completion for row in rows])
        assert rollout.rewards is not None
        metrics = {name: values[-1] for name, values in self.trainer._metrics[rollout.mode].items() if values}
        names, weights = self.trainer.reward_func_names, self.trainer.reward_weights
        summary = summary_of(rollout.rewards, names, weights, metrics)
        self.sink.add(record, [row.thumbnails for row in rows], summary)

    def _description(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "name": self.args.run_name or Path(self.args.output_dir).resolve().name,
            "rewards": list(trainer.reward_func_names),
            "model": str(getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__),
            "options": self.args.to_sanitized_dict(),
        }

    # Beside the rollouts

    def log(self, logs: dict[str, Any], mode: str) -> None:
        """Record what the trainer has logged."""
        if not self.is_on or not self.trainer.accelerator.is_main_process:
            return
        values: dict[str, float | None] = {
            name: float(value) for name, value in logs.items() if isinstance(value, (int, float))
        }
        self.sink.log(LogEntry(self.trainer.state.global_step, mode, time.time(), values))

    def evaluated(self) -> None:
        """An evaluation is over: the next one is recorded again."""
        self._last["eval"] = None


class _Flushing(TrainerCallback):
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
