"""What a trainer leaves of its rollouts for people to look at: records, Markdown logs, lines on the terminal."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from vgr_trl.config.report import LOG_OPTIONS
from vgr_trl.errors import ConfigError
from vgr_trl.reporting.records.format import Completion, LogEntry, Record
from vgr_trl.reporting.records.reading import FOLDER
from vgr_trl.reporting.records.thumbnails import shrunk
from vgr_trl.reporting.records.writing import refuse_unwritable
from vgr_trl.reporting.sink import RecordSink
from vgr_trl.reporting.views.markdown.logs import markdown_logs
from vgr_trl.signals import Measurement
from vgr_trl.signals.ratios import late_layers
from vgr_trl.training.host import Host
from vgr_trl.training.recording.images import grids_of_row, images_of_row, quantised
from vgr_trl.training.recording.rows import (
    RecordedRow,
    accuracy_name,
    measures_of_row,
    question_id,
    rows_to_record,
    signals_of_row,
    summary_of,
    texts_of_row,
)
from vgr_trl.training.rollout import Rollout


class RolloutRecorder:
    """Records a few completions of rollouts, in a thread of the main process.

    Every process takes part in what is gathered, at the same steps.

    Args:
        host: where it runs.
        measurement: what is measured of rollout batches.
        processor: of the model.
        model: its name.

    Raises:
        ConfigError: a file or folder cannot be written, or a log is asked for that nothing is measured for.
    """

    def __init__(self, host: Host, measurement: Measurement, processor: Any, model: str) -> None:
        self.host, self.args, self.measurement = host, host.args, measurement
        self.is_on = self.args.rollout_log_steps > 0
        self._last: dict[str, int | None] = {"train": None, "eval": None}
        self._merge_size = getattr(getattr(processor, "image_processor", None), "merge_size", None)
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

    def keep(self, rollout: Rollout) -> list[RecordedRow]:
        """Return the recorded rows of a judged rollout, before groups are replaced and credit is spread."""
        offset = self.host.accelerator.process_index * len(rollout.rows)
        return [self._row(rollout, row, offset + row) for row in rollout.recorded or ()]

    def _row(self, rollout: Rollout, row: int, place: int) -> RecordedRow:
        batch, tokenizer = rollout.batch, self.host.tokenizer
        texts = texts_of_row(batch, row, tokenizer.decode, tokenizer.pad_token_id, self.measurement.vision_token_ids)
        length = len(texts["tokens"])
        measured: dict[str, Any] = {}
        num_vision = None
        if rollout.signals is not None:
            signals = signals_of_row(rollout.signals, row)
            if signals.attention is not None:
                num_vision = int(signals.attention.num_vision[0])
            measured = measures_of_row(signals, length, self.args)
        grids = grids_of_row(batch, row, self._merge_size, num_vision)
        data = rollout.rows[row]
        images, thumbnails, digest = images_of_row(data, grids)
        if (attention := (rollout.maps or {}).get(row)) is not None:
            late = late_layers(len(attention), self.args.attention_segments)
            measured["attention"] = quantised(attention[late].mean(0)[:length], grids)
        if rollout.changes is not None and images:
            measured["changes"] = rollout.changes[row, :length].tolist()
        if rollout.perturbed_images is not None:
            thumbnails += [shrunk(image) for image in rollout.perturbed_images[row]]
        solution = data.get("solution")
        assert rollout.rewards is not None
        completion = Completion(
            question=question_id(texts["prompt"], digest),
            group=place // self.host.num_generations,
            solution=None if solution is None else str(solution),
            advantage=float(batch["advantages"][row]),
            images=images,
            **texts,
            **measured,
            **self._rewards(rollout.rewards[place]),
        )
        return RecordedRow(place, completion, thumbnails)

    def _rewards(self, earned: torch.Tensor) -> dict[str, Any]:
        """Of one completion, from what the functions gave it, (F,)."""
        rewards = dict(zip(self.host.reward_names, earned.tolist(), strict=True))
        right = rewards.get(accuracy_name(self.host.reward_names) or "")
        return {
            "rewards": rewards,
            "reward": float((earned * self.host.reward_weights.to(earned.device)).nansum()),
            "correct": None if right is None or math.isnan(right) else right == 1,
        }

    def record_credit(self, recorded: list[RecordedRow], chosen: Rollout, spread: Rollout) -> None:
        """Add to recorded rows what the loss reads of them.

        Args:
            recorded: as `keep` returned them.
            chosen: the rollout, groups replaced, before credit is spread.
            spread: likewise, with advantages (N,) or (N, T) as the loss reads them.
        """
        before, after = chosen.batch["advantages"], spread.batch["advantages"]
        for row, entry in zip(chosen.recorded or (), recorded, strict=True):
            completion = entry.completion
            if completion.group in chosen.replaced:
                completion.replaced = True
                continue
            completion.advantage = float(before[row])
            length = len(completion.tokens)
            if completion.weights is not None and self.args.token_weights_positive_only and completion.advantage < 0:
                completion.weights = [1.0] * length
            credit = after[row].tolist()
            completion.advantages = credit[:length] if isinstance(credit, list) else [credit] * length

    def write(self, rollout: Rollout, recorded: list[RecordedRow]) -> None:
        """Gather the recorded rows of a rollout, and let the main process write them; every process calls."""
        if rollout.recorded is None:
            return
        host = self.host
        gathered = gather_object(recorded)
        if not host.accelerator.is_main_process:
            return
        rows = sorted(gathered, key=lambda row: row.place)
        record = Record(host.state.global_step, host.mode, time.time(), [row.completion for row in rows])
        assert rollout.rewards is not None
        summary = summary_of(rollout.rewards, host.reward_names, host.reward_weights, host.newest_metrics())
        self.sink.add(record, [row.thumbnails for row in rows], summary)

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
