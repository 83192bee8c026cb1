"""Record rollouts: turn a few rows of a batch into the completions of a record.

In the order of a rollout: `rows_due` chooses the rows, `snapshot` makes completions of them once their rewards are
known, `add_credit` adds advantages and weights, and `write` gathers them so that the main process writes records,
Markdown and console logs.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import logging

from vgr_trl import __version__
from vgr_trl.config import LOG_OPTIONS
from vgr_trl.errors import error_text
from vgr_trl.options import changed_options
from vgr_trl.reporting.console import print_record
from vgr_trl.reporting.markdown import MarkdownLogs
from vgr_trl.reporting.recorded_rows import (
    RecordedRow,
    completion_measurements,
    describe_turns,
    find_accuracy,
    find_image_grids,
    name_images,
    prompt_text,
    quantise_attention,
    read_row_images,
    record_image,
    split_tokens,
    strip_padding,
    summarise_rollout,
)
from vgr_trl.reporting.records import FOLDER, Completion, LogEntry, Record, RecordWriter, question_id, refuse_unwritable
from vgr_trl.rewards.answers import decode_with_tags
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.signals.named import take_signal_rows

logger = logging.get_logger(__name__)


class RolloutRecorder:
    """Record a few completions of rollouts. Every process gathers its rows; the main process writes.

    Raises:
        ConfigError: a file or folder cannot be written.
    """

    def __init__(self, run: Run, reward_names: Sequence[str]) -> None:
        self.run, self.args, self.reward_names = run, run.args, reward_names
        self.is_on = self.args.rollout_log_steps > 0
        self.output_dir = Path(str(self.args.output_dir))
        unlike_default = changed_options(self.args).items()
        self._changed = [name for name, value in unlike_default if value not in ([], AcceleratorConfig())]
        has_attention = "attention" in run.measurement.needed
        self.logs = MarkdownLogs(self.args, time.strftime("%Y%m%d_%H%M%S"), has_attention)
        self._last: dict[str, int] = {}  # mode -> step of the last record
        self._writer: RecordWriter | None = None
        if self.is_on and run.accelerator.is_main_process:
            refuse_unwritable(self.output_dir / FOLDER, "output_dir", is_folder=True)
            for option in LOG_OPTIONS:
                if (path := vars(self.args)[option]) is not None:
                    refuse_unwritable(Path(path), option)

    def rows_due(self, rows: int) -> tuple[int, ...] | None:
        """Choose the rows of this process to record in the rollout that begins; None if no process records any.

        Args:
            rows: completions per process.
        """
        if not self.is_on:
            return None
        run, mode, step = self.run, "train" if self.run.trains else "eval", self.run.step
        # Record the first batch of each evaluation; in training, the first rollout of every N steps.
        last, every = self._last.get(mode), self.args.rollout_log_steps if mode == "train" else 1
        if last is None and mode == "train" and step > 0:  # resumed: follow the schedule from the rollout before
            last = step - max(int(self.args.steps_per_rollout), 1)
        if last is not None and step // every == last // every:
            return None
        self._last[mode] = step
        first, total = run.accelerator.process_index * rows, rows * run.accelerator.num_processes
        # Two completions of a prompt can be compared; another prompt is more useful than a third completion.
        size = run.completions_per_prompt
        in_pairs = sorted(range(total), key=lambda row: (row % size // 2, row))
        chosen = sorted(in_pairs[: self.args.rollout_log_samples])
        return tuple(row - first for row in chosen if first <= row < first + rows)

    def snapshot(self, rollout: Rollout, weights: Tensor) -> list[RecordedRow]:
        """Return the recorded rows of a rollout with rewards, before group selection and credit assignment.

        Args:
            rollout: a rewarded rollout.
            weights: (F,), weights of the reward functions.
        """
        return [self._record_row(rollout, row, weights.cpu()) for row in rollout.recorded or ()]

    def _record_row(self, rollout: Rollout, row: int, weights: Tensor) -> RecordedRow:
        run, batch, data, tokenizer = self.run, rollout.batch, rollout.rows[row], self.run.tokenizer
        place, turns = rollout.first + row, rollout.turns
        signals, vision = take_signal_rows(rollout.signals, [row]), run.measurement.vision_token_ids
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids, mask = batch["completion_ids"][row].tolist(), batch["completion_mask"][row].tolist()
        ids = strip_padding(ids, mask, tokenizer.pad_token_id)
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        prompt, rewards = prompt_text(prompt_ids, vision, decode), rollout.rewards[place].cpu()
        num_vision = None if signals is None or signals.attention is None else int(signals.attention.num_vision)
        grids = find_image_grids(batch, row, run.processor, num_vision)
        returned = [] if turns is None else turns.returned[row]
        images, thumbnails = read_row_images(data, grids, returned)
        for image, perturbed in zip(images, rollout.perturbed_images.get(row, []), strict=False):
            image.perturbed = record_image(perturbed, thumbnails).file
        completion = Completion(
            question=question_id(prompt, [image.file for image in images[: len(images) - len(returned)]]),
            group=place // run.completions_per_prompt,
            prompt=prompt,
            text=decode_with_tags(tokenizer, [ids])[0],
            tokens=name_images(split_tokens(ids, decode), ids, vision),
            solution=None if data.get("solution") is None else str(data["solution"]),
            rewards=dict(zip(self.reward_names, rewards.tolist(), strict=True)),
            reward=(rewards * weights).nansum().item(),
            advantage=batch["advantages"][row].item(),
            images=images,
            turns=[] if turns is None else describe_turns(turns, row, len(ids)),
            **({} if signals is None else completion_measurements(signals, len(ids), self.args)),
        )
        accuracy = find_accuracy(completion.rewards)
        completion.correct = None if accuracy is None or isnan(accuracy) else accuracy == 1
        if rollout.changes is not None and images:
            completion.changes = rollout.changes[row, : len(ids)].tolist()
        completion.teacher_images = [record_image(each, thumbnails) for each in rollout.teacher_images.get(row, [])]
        if rollout.teacher_top is not None and completion.teacher_images:
            completion.teacher = [decode([token]) for token in rollout.teacher_top[0][row, : len(ids), 0].tolist()]
        if rollout.scores is not None and row in (maps := rollout.scores.maps or {}):
            completion.attention = quantise_attention(maps[row].mean(0)[: len(ids)], grids)
        return RecordedRow(place, completion, thumbnails)

    def add_credit(self, recorded: list[RecordedRow], selected: Rollout, before: Tensor, after: Tensor) -> None:
        """Add advantages, and the weights in effect, to recorded rows.

        Args:
            recorded: rows of `snapshot`.
            selected: the rollout after group selection.
            before: advantages before credit assignment, (N,), or (N, T) with a critic (the mean is recorded).
            after: advantages after credit assignment, (N,) or (N, T).
        """
        for item, row in zip(recorded, selected.recorded or (), strict=True):
            completion, length = item.completion, len(item.completion.tokens)
            if completion.group in selected.replaced:
                completion.replaced = True
                continue
            advantage, credit = before[row], after[row]
            completion.advantage = (advantage[:length].sum() / max(length, 1) if advantage.ndim else advantage).item()
            completion.advantages = credit[:length].tolist() if credit.ndim else [credit.item()] * length
            completion.credit = {name: weights[row, :length].tolist() for name, weights in selected.credit.items()}
            if self.args.token_weights_positive_only and completion.advantage < 0 and completion.weights is not None:
                completion.weights = [1.0] * length

    def write(
        self, rollout: Rollout, recorded: list[RecordedRow], weights: Tensor, metrics: Mapping[str, float]
    ) -> None:
        """Gather the recorded rows, and write them on the main process; every process must call this.

        Args:
            rollout: a rewarded rollout.
            recorded: rows of `snapshot`.
            weights: (F,), weights of the reward functions.
            metrics: newest value of each metric.
        """
        if rollout.recorded is None:
            return
        recorded = sorted(gather_object(recorded), key=lambda item: item.place)
        if not self.run.accelerator.is_main_process:
            return
        completions, mode = [item.completion for item in recorded], "train" if self.run.trains else "eval"
        record = Record(self.run.step, mode, time.time(), completions, self._by_name(weights))
        with self._log_failures():
            self._open_writer(record.step, weights).add(
                record, dict(chain(*(item.thumbnails.items() for item in recorded)))
            )
        with self._log_failures():
            summary = summarise_rollout(rollout.rewards.cpu(), self.reward_names, weights.cpu(), metrics)
            self.logs.add(record, summary)
        if self.args.colorize_output:
            print_record(record, prompt_length=self.args.prompt_preview_length)

    def _by_name(self, weights: Tensor) -> dict[str, float]:
        return dict(zip(self.reward_names, weights.tolist(), strict=True))

    def log(self, logs: dict[str, Any], mode: str, weights: Tensor) -> None:
        """Record a log of the trainer, made in `train` or `eval` mode with reward weights (F,)."""
        if self.is_on and self.run.accelerator.is_main_process:
            step = self.run.step
            values = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
            with self._log_failures():
                self._open_writer(step, weights).log(LogEntry(step, mode, time.time(), {**values}))

    @contextmanager
    def _log_failures(self) -> Iterator[None]:
        """Log errors instead of raising them: recording must not stop the training."""
        try:
            yield
        except Exception as error:
            reason = error_text(error).rstrip(".")
            logger.warning_once(f"Rollouts cannot be recorded ({reason}); training continues without these records.")

    def _open_writer(self, step: int, weights: Tensor) -> RecordWriter:
        """Return the writer, opened at the first record; a run that begins after step 0 is a resumed run."""
        if self._writer is None:
            model = self.run.model
            description = {
                "name": self.args.run_name or self.output_dir.resolve().name,
                "rewards": list(self.reward_names),
                "model": str(model.config._name_or_path or type(model).__name__),
                "options": self.args.to_sanitized_dict(),
                "changed": self._changed,
                "setup": describe_setup(model, self.run.accelerator, self._by_name(weights)),
            }
            max_bytes = int(self.args.rollout_log_max_megabytes * 1e6)
            self._writer = RecordWriter(self.output_dir, description, max_bytes, resumed=step > 0)
        return self._writer


def describe_setup(model: Any, accelerator: Accelerator, weights: Mapping[str, float]) -> dict[str, str]:
    """Return rewards, LoRA, command (without tokens), device, versions and commit of a run, as text by name.

    Args:
        model: the policy, with or without adapters.
        accelerator: device and processes.
        weights: name of a reward -> its weight.
    """
    adapters = getattr(model, "peft_config", None) or {}
    lora = [f"r={config.r}, alpha={config.lora_alpha}, {config.target_modules}" for config in adapters.values()]
    commit = ""
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    device = accelerator.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    versions = [f"vgr_trl {__version__}"]
    for name in ("trl", "transformers", "torch", "peft", "vllm"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return {
        "rewards": ", ".join(f"{name} x {weight:g}" for name, weight in weights.items()),
        "LoRA": "; ".join(lora) or "no",
        "command": re.sub(r"(--\w*(?:token|key)[= ])\S+", r"\1…", command),
        "device": f"{accelerator.num_processes} x {place}",
        "versions": ", ".join(versions),
        "commit": commit,
    }
