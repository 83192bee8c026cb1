"""Record rollouts: turn a few rows of a batch into the completions of a record.

In the order of a rollout: `rows_due` chooses the rows, `snapshot` makes completions of them once their rewards are
known, `add_credit` adds advantages and weights, and `write` gathers them so that the main process writes records,
Markdown and console logs. The functions below the recorder make tokens, images, attention maps, turns and measurements
of a row; `RecordBeforeTraining` records answers before the first step.
"""

import copy
import io
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha1
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, cycle, groupby, islice, repeat
from math import isnan, isqrt, prod
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from vgr_trl import __version__
from vgr_trl.batch import Turns
from vgr_trl.config import LOG_OPTIONS
from vgr_trl.credit import REWARD_FILE_WEIGHTS, attention_weights
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import ReadOnce, is_repeatable
from vgr_trl.data.images import boxes_of, images_of, open_image
from vgr_trl.data.prompts import to_parts
from vgr_trl.errors import DataError, error_text
from vgr_trl.options import changed_options
from vgr_trl.patches.trl import unlogged
from vgr_trl.patching import keep_random_state, patched_attribute
from vgr_trl.pixels import RowImages
from vgr_trl.reporting.console import print_record
from vgr_trl.reporting.markdown import MarkdownLogs, Summary
from vgr_trl.reporting.records import (
    FOLDER,
    AttentionMap,
    Completion,
    LogEntry,
    Record,
    RecordedImage,
    RecordWriter,
    Turn,
    question_id,
    refuse_unwritable,
)
from vgr_trl.rewards.answers import decode_with_tags
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.signals.named import ATTENTION_QUANTITIES, RolloutSignals, reward_columns, take_signal_rows
from vgr_trl.signals.ratios import late_layers, measure_segments, token_vision_gain_ratio
from vgr_trl.views.regions import boxes_in_pixels

logger = logging.get_logger(__name__)
THUMBNAIL_SIDE = 256  # maximum, in pixels
WEBP_QUALITY = 80  # out of 100: about 5 kB for a photograph of that size
_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(ATTENTION_QUANTITIES)})")
Grid = tuple[int, int]
Decode = Callable[[list[int]], Any]  # a tokenizer's, with special tokens and without clean-up


@dataclass
class RecordedRow:
    """A recorded row: its index over all processes, its completion, and thumbnails by name."""

    place: int
    completion: Completion
    thumbnails: dict[str, bytes]


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
        ids, mask = batch.completion_ids[row].tolist(), batch.completion_mask[row].tolist()
        ids = strip_padding(ids, mask, tokenizer.pad_token_id)
        prompt_ids = batch.prompt_ids[row][batch.prompt_mask[row].bool()].tolist()
        prompt, rewards = prompt_text(prompt_ids, vision, decode), rollout.rewards[place].cpu()
        num_vision = None if signals is None or signals.attention is None else int(signals.attention.num_vision)
        grids = find_image_grids(batch.images, row, run.processor, num_vision)
        returned = [] if turns is None else turns.returned[row]
        shown = images_of(data) if turns is None else turns.images[row]
        images, thumbnails = read_row_images(data, shown, grids)
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
            advantage=cast("Tensor", batch.advantages)[row].item(),
            images=images,
            turns=[] if turns is None else describe_turns(turns, row, len(ids)),
            **({} if signals is None else completion_measurements(signals, len(ids), self.args)),
        )
        accuracy = find_accuracy(completion.rewards)
        completion.correct = None if accuracy is None or isnan(accuracy) else accuracy == 1
        if rollout.changes is not None and images:
            completion.changes = rollout.changes[row, : len(ids)].tolist()
        completion.teacher_images = [record_image(image, thumbnails) for image in rollout.teacher_images.get(row, [])]
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
    commit, git = "", shutil.which("git") or "git"  # without a folder Python would show its warnings once more
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
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


def describe_turns(turns: Turns, row: int, length: int) -> list[Turn]:
    """Return the turns of a completion, with the calls at their ends and the answers of tools.

    Args:
        turns: turns of the batch.
        row: index in the batch.
        length: tokens of the completion.
    """
    runs = (list(run) for is_own, run in groupby(enumerate(turns.by_policy[row][:length]), itemgetter(1)) if is_own)
    spans = [(run[0][0], run[-1][0] + 1) for run in runs]
    described: list[Turn] = []
    for message in turns.messages[row]:
        if message["role"] == "assistant" and len(described) < len(spans):
            calls = [_format_call(call) for call in message.get("tool_calls") or ()]
            described.append(Turn(*spans[len(described)], calls, [], 0))
        elif message["role"] == "tool" and described:
            texts = ["<image>" if part["type"] == "image" else part["text"] for part in to_parts(message["content"])]
            described[-1].answers.append("".join(texts))
            described[-1].images += sum(part["type"] == "image" for part in to_parts(message["content"]))
    return described


def _format_call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    texts = (f"{name}={value!r}" for name, value in arguments.items()) if isinstance(arguments, dict) else [arguments]
    return f"{function.get('name', 'unknown')}({', '.join(map(str, texts))})"


def read_row_images(
    row: Mapping[str, Any], images: Sequence[Any], grids: Sequence[Grid | None]
) -> tuple[list[RecordedImage], dict[str, bytes]]:
    """Return the images of a completion, and thumbnails by name; an unreadable image has size 0.

    Args:
        row: row of the data, which may have boxes of its only image.
        images: images of its prompt and of its tools.
        grids: rows and columns of the vision tokens of each image; images beyond them have no grid.
    """
    recorded: list[RecordedImage] = []
    thumbnails: dict[str, bytes] = {}
    for value, grid in zip(images, chain(grids, repeat(None)), strict=False):
        try:
            recorded.append(record_image(open_image(value), thumbnails, grid))
        except DataError:  # a `rollout_func` may have read it otherwise
            recorded.append(RecordedImage(None, 0, 0, grid))
    if len(recorded) == 1:
        size = recorded[0].width, recorded[0].height
        with suppress(DataError):  # the column has no boxes
            recorded[0].regions = boxes_in_pixels(boxes_of(row, size), size) or None
    return recorded, thumbnails


def record_image(image: Image.Image, thumbnails: dict[str, bytes], grid: Grid | None = None) -> RecordedImage:
    """Describe an image; add its thumbnail of at most 256 pixels per side, on white if transparent.

    Args:
        image: any image; equal images get the same name.
        thumbnails: receives the content of a WebP file, by name.
        grid: rows and columns of its vision tokens; None if unknown.
    """
    small, data = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    if small.has_transparency_data:
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small.convert("RGBA"))
    small.convert("RGB").save(data, "WEBP", quality=WEBP_QUALITY)
    name = f"images/{sha1(data.getvalue(), usedforsecurity=False).hexdigest()}.webp"
    thumbnails[name] = data.getvalue()
    return RecordedImage(name, *image.size, grid)


def find_image_grids(images: RowImages, row: int, processor: Any, num_vision: int | None) -> list[Grid | None]:
    """Return the grid of vision tokens (rows, columns) for each image of a row; None if unknown.

    Supported: grids from processors of the Qwen family, and square grids of equal images without tiles.

    Args:
        images: images of a batch.
        row: index in the batch.
        processor: processor of the model; its image processor says how many patches per side `image_grid_thw` merges.
        num_vision: vision tokens of the row's prompt; None if unknown.
    """
    counts, tensors = images.num_images or [0] * (row + 1), images.tensors
    count, first = counts[row], sum(counts[:row])
    grids = tensors.get("image_grid_thw")
    if grids is not None and (size := getattr(processor.image_processor, "merge_size", None)) is not None:
        return [(h // size, w // size) if t == 1 else None for t, h, w in grids[first : first + count].tolist()]
    tiled = images.num_tiles is not None or not tensors.keys().isdisjoint(("image_sizes", "spatial_shapes"))
    side = isqrt(num_vision // count) if num_vision and count and grids is None and not tiled else 0
    return [(side, side) if side and side * side * count == num_vision else None] * count


def quantise_attention(attention: Tensor, grids: Sequence[Grid | None]) -> AttentionMap | None:
    """Quantise attention over vision tokens to one byte per number; None unless the grids have V cells.

    The error is at most 1 / 510 of the largest attention of its token.

    Args:
        attention: (T, V).
        grids: rows and columns of the vision tokens of each image.
    """
    cells = [prod(grid) if grid is not None else 0 for grid in grids]
    if not cells or not all(cells) or sum(cells) != attention.size(1) or not len(attention):
        return None
    attention = attention.float()
    scale = attention.amax(dim=1)  # (T,)
    shares = attention / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return AttentionMap(scale.tolist(), (shares * 255).round().to(torch.uint8).cpu().numpy().tobytes())


def strip_padding(ids: Sequence[int], mask: Sequence[int], pad_token_id: int) -> list[int]:
    """Return the tokens of a completion without padding; TRL masks a truncated completion as a whole.

    Args:
        ids, mask: (T,) of the completion.
        pad_token_id: ends the completion if its mask is empty.
    """
    length = sum(mask) or max((index + 1 for index, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[:length])


def split_tokens(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token; concatenated, they are the text of all tokens.

    A character whose bytes span several tokens belongs to the last of them, and the others are empty. Invalid bytes of
    consecutive tokens belong to the following token, or to the last. Each token is decoded after the one before it,
    because some tokenizers drop a leading space.
    """
    alone = [decode([token]) for token in ids]
    if "".join(alone) == decode(list(ids)):
        return alone
    pieces: list[str] = []
    before = start = 0  # tokens from `start` on are part of an incomplete character
    for end in range(1, len(ids) + 1):
        context, text = decode(list(ids[before:start])), decode(list(ids[before:end]))
        if text.endswith("\ufffd") and end < len(ids):  # an incomplete character decodes to U+FFFD
            pieces.append("")
            continue
        pieces.append(text.removeprefix(context) if text.startswith(context) else alone[end - 1])
        before, start = start, end
    return pieces


def name_images(tokens: Sequence[str], ids: Sequence[int], vision_token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a run of vision tokens becomes `<image>` and empty texts.

    Args:
        tokens: text of the T tokens.
        ids: (T,), the tokens.
        vision_token_ids: placeholder tokens of images.
    """
    vision = [token in vision_token_ids for token in ids]
    runs = zip(tokens, vision, [False, *vision], strict=False)
    return [text if not is_vision else "" if follows else "<image>" for text, is_vision, follows in runs]


def prompt_text(ids: Sequence[int], vision_token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of a prompt, with `<image>` for each run of vision tokens.

    Args:
        ids: tokens of the prompt, without padding.
        vision_token_ids: placeholder tokens of images.
        decode: returns the text of tokens.
    """
    runs = groupby(ids, key=set(vision_token_ids).__contains__)
    return "".join("<image>" if is_vision else decode(list(run)) for is_vision, run in runs)


def completion_measurements(signals: RolloutSignals, length: int, options: Any) -> dict[str, Any]:
    """Collect a completion's measurements by attribute of `Completion`.

    Args:
        signals: signals of this row, (1, T).
        options: `DAPOConfig`.
    """
    columns = {"logps": signals.logps, "entropies": signals.entropies, "dependency": signals.dependency}  # (1, T) each
    measured: dict[str, Any] = {}
    if (mass := signals.attention) is not None:
        columns["vgr"] = token_vision_gain_ratio(mass, late_layers(len(mass.vision), options.attention_segments))
        if options.token_weights:
            columns["weights"] = attention_weights(mass, signals.mask, options)
        segments = measure_segments(mass, options.attention_segments, options.mdi_balance_ratio)
        measured["metrics"] = reward_columns(segments)["attention_metrics"][0]

    def rows_of(values: Mapping[str, Tensor | None]) -> dict[str, Any]:
        rows = {name: value[0, :length] for name, value in values.items() if value is not None}
        return {name: row.tolist() for name, row in rows.items() if not row.isnan().all()}  # all NaN if not measured

    extra = {name: value for name, value in signals.extra.items() if name not in {REWARD_FILE_WEIGHTS, *columns}}
    return measured | rows_of(columns) | {"signals": rows_of(extra)}


def find_accuracy(values: Mapping[str, Any]) -> Any:
    """Find the accuracy reward among values by reward name; None without that reward."""
    return next((value for name, value in values.items() if name.startswith("accuracy")), None)


def summarise_rollout(rewards: Tensor, names: Sequence[str], weights: Tensor, metrics: Mapping[str, float]) -> Summary:
    """Summarise a rollout batch in numbers.

    Args:
        rewards: (N of all processes, number of functions), NaN if a reward does not apply.
        weights: (number of functions,).
        metrics: metrics of the batch, by logged name.
    """
    columns = {**dict(zip(names, rewards.double().T, strict=True)), "total": (rewards * weights).double().nansum(dim=1)}
    summary = Summary(len(rewards), {name: (v.nanmean().item(), nanstd(v).item()) for name, v in columns.items()})
    if (accuracy := find_accuracy(columns)) is not None:
        summary.success_rate = (accuracy[~accuracy.isnan()] == 1).double().mean().item()
    for name, value in metrics.items():
        if match := _SEGMENT_METRIC.fullmatch(name):
            summary.segments.setdefault(match[1], {})[match[2]] = value
        elif name.startswith("token_weight_") or "token_fraction" in name:
            summary.credit[name] = value
    return summary


class RecordBeforeTraining(TrainerCallback):
    """Record the first evaluation batch at step 0, so that later evaluations can be compared with it.

    Costs one rollout, including reward functions. Random state, metrics and completion tables are restored.

    Attributes:
        scores: metrics of the batch, named as in an evaluation; empty until it is recorded.
        completions: number of completions in the batch, over all processes.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer, self.scores = trainer, dict[str, float]()
        self.completions = trainer.args.eval_batch_size * trainer.accelerator.num_processes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the batch, unless the run is resumed."""
        trainer: Any = self._trainer
        if state.global_step > 0 or not needs_record_before_training(trainer.args, trainer.eval_dataset):
            return
        data, size = trainer.eval_dataset, trainer.args.eval_batch_size
        first = trainer.accelerator.process_index * size
        numbers = [*islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]
        rows = ReadOnce(data, "evaluation").__getitems__(numbers) if is_repeatable(data) else [data[i] for i in numbers]
        logs = patched_attribute(trainer, "_logs", copy.deepcopy(trainer._logs))
        python, numpy = random.getstate(), np.random.get_state()
        trainer.model_wrapped.eval()
        try:
            with keep_random_state(trainer.accelerator.device), torch.no_grad(), unlogged(trainer), logs:
                trainer._prepare_inputs(rows)
                self.scores = {f"eval_{name}": fmean(values) for name, values in trainer._metrics["eval"].items()}
        finally:
            trainer.model_wrapped.train()
            random.setstate(python)
            np.random.set_state(numpy)


def needs_record_before_training(args: DAPOConfig, data: Any) -> bool:
    """Whether a run records rollouts, evaluates one data set of known length, and not already at step 0."""
    wanted = args.rollout_log_steps > 0 and not args.eval_on_start and args.eval_strategy != "no"
    return wanted and isinstance(data, Sized) and not isinstance(data, dict) and len(data) > 0
