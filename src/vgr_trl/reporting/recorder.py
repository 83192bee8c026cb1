"""Recording rollouts: a few rows of a batch become the completions of a record.

In the order of a rollout: `rows_due` says which rows are recorded, `snapshot` makes completions of them once their
rewards are known, `add_credit` adds what the loss reads of them, and `write` gathers them and lets the main process
write records, Markdown and printed text.
"""

import copy
import io
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha1
from itertools import chain, cycle, groupby, islice, repeat
from math import isnan, isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from transformers import TrainerCallback
from transformers.utils import logging

from vgr_trl.config import LOG_OPTIONS
from vgr_trl.credit import attention_weights
from vgr_trl.data.images import boxes_of, images_of, open_image
from vgr_trl.options import changed_options
from vgr_trl.reporting.markdown import MarkdownLogs, Summary, print_record
from vgr_trl.reporting.records import (
    FOLDER,
    AttentionMap,
    Completion,
    LogEntry,
    Record,
    RecordedImage,
    RecordWriter,
    refuse_unwritable,
)
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.signals.named import QUANTITIES, RolloutSignals, reward_columns, signals_of_rows
from vgr_trl.signals.ratios import late_layers, measure_segments, token_vision_gain_ratio
from vgr_trl.signals.regions import in_pixels
from vgr_trl.utils import ConfigError, DataError, error_text

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)

THUMBNAIL_SIDE = 256  # of a thumbnail, in pixels
WEBP_QUALITY = 80  # of WebP, of 100: about 5 kB for a photograph of that size
_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(QUANTITIES)})")

Grid = tuple[int, int]
Decode = Callable[[list[int]], str]  # keeps special tokens, does not clean up


@dataclass
class RecordedRow:
    """A recorded row: its number among the rows of all processes, its completion, the thumbnails that this names."""

    place: int
    completion: Completion
    thumbnails: dict[str, bytes]


class RolloutRecorder:
    """Records a few completions of rollouts. All processes take part in what is gathered; the main one writes.

    Raises:
        ConfigError: a file or folder cannot be written, or nothing is measured for a log.
    """

    def __init__(self, trainer: "DAPOTrainer") -> None:
        self.trainer, self.args = trainer, trainer.args
        self.is_on = self.args.rollout_log_steps > 0
        self.output_dir = Path(str(self.args.output_dir))
        self._changed = list(changed_options(self.args))
        has_attention = "attention" in trainer.measurement.needed
        self.logs = MarkdownLogs(self.args, time.strftime("%Y%m%d_%H%M%S"), has_attention)
        self._last: dict[str, int | None] = {"train": None, "eval": None}  # step of the last record
        self._writer: RecordWriter | None = None
        self._warned: set[type] = set()
        if not self.is_on:
            return
        for option, is_measured, cure in (
            ("attention_diag_log_path", has_attention, "compute_attention_metrics"),
            ("token_weights_log_path", self.args.token_weights, "token_weights"),
        ):
            if getattr(self.args, option) is not None and not is_measured:
                raise ConfigError(
                    f"{option} is {getattr(self.args, option)}, but nothing is measured for it: switch {cure} on, or "
                    f"leave {option} out."
                )
        if trainer.accelerator.is_main_process:
            refuse_unwritable(self.output_dir / FOLDER, "output_dir", is_folder=True)
            for option in LOG_OPTIONS:
                if (path := getattr(self.args, option)) is not None:
                    refuse_unwritable(Path(path), option)

    def rows_due(self, rows: int) -> tuple[int, ...] | None:
        """Return which rows of this process are recorded of a rollout that begins; None if none is in any process.

        Args:
            rows: completions of each process.
        """
        if not self.is_on:
            return None
        trainer, mode, step = self.trainer, self.trainer.mode, self.trainer.state.global_step
        # Of each evaluation the first batch; in training the first one after every so many steps.
        last, every = self._last[mode], self.args.rollout_log_steps if mode == "train" else 1
        if last is not None and step // every == last // every:
            return None
        self._last[mode] = step
        first, total = trainer.accelerator.process_index * rows, rows * trainer.accelerator.num_processes
        chosen = choose_rows(self.args.rollout_log_samples, trainer.completions_per_prompt, total)
        return tuple(row - first for row in chosen if first <= row < first + rows)

    def snapshot(self, rollout: Rollout) -> list[RecordedRow]:
        """Return the recorded rows of a rollout whose rewards are known, before groups are selected and credited."""
        trainer, batch, chosen = self.trainer, rollout.batch, list(rollout.recorded or ())
        size = trainer.completions_per_prompt
        first = trainer.accelerator.process_index * len(rollout.rows)
        merge_size = getattr(getattr(trainer.processing_class, "image_processor", None), "merge_size", None)
        tokenizer = trainer._tokenizer

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

        assert rollout.rewards is not None
        recorded = []
        for row in chosen:
            data, place = rollout.rows[row], first + row
            ids, mask = batch["completion_ids"][row].tolist(), batch["completion_mask"][row].tolist()
            ids = strip_padding(ids, mask, tokenizer.pad_token_id)
            signals = None if rollout.signals is None else signals_of_rows(rollout.signals, [row])
            num_vision = None if signals is None or signals.attention is None else int(signals.attention.num_vision)
            grids = find_image_grids(batch, row, merge_size, num_vision)
            images, thumbnails, digest = read_row_images(data, grids)
            perturbed_images = rollout.perturbed_images[row] if rollout.perturbed_images is not None else []
            for image, perturbed in zip(images, perturbed_images, strict=False):
                image.perturbed, content = make_thumbnail(perturbed)
                thumbnails[image.perturbed] = content
            prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            prompt = prompt_text(prompt_ids, trainer.measurement.vision_token_ids, decode)
            completion = Completion(
                question=question_id(prompt, digest),
                group=place // size,
                prompt=prompt,
                text=str(tokenizer.decode(ids, skip_special_tokens=True)),
                tokens=split_tokens(ids, decode),
                solution=None if data.get("solution") is None else str(data["solution"]),
                advantage=batch["advantages"][row].item(),
                images=images,
                **({} if signals is None else completion_measurements(signals, len(ids), self.args)),
            )
            if rollout.changes is not None and images:
                completion.changes = rollout.changes[row, : len(ids)].tolist()
            maps = {} if rollout.scores is None else rollout.scores.maps or {}
            if row in maps:
                completion.attention = quantise_attention(maps[row].mean(0)[: len(ids)], grids)
            self._add_rewards(completion, rollout.rewards[place].tolist())
            recorded.append(RecordedRow(place, completion, thumbnails))
        return recorded

    def _add_rewards(self, completion: Completion, values: list[float]) -> None:
        names, weights = self.trainer.reward_func_names, self.trainer.reward_weights.tolist()
        completion.rewards = dict(zip(names, values, strict=True))
        weighted = (value * weight for value, weight in zip(values, weights, strict=True))
        completion.reward = sum(value for value in weighted if not isnan(value))
        accuracy = completion.rewards.get(accuracy_reward_name(names) or "")
        completion.correct = None if accuracy is None or isnan(accuracy) else accuracy == 1

    def add_credit(
        self, recorded: list[RecordedRow], selected: Rollout, before: torch.Tensor, after: torch.Tensor
    ) -> None:
        """Add to recorded rows what the loss reads of them.

        Args:
            selected: the rollout after groups were selected.
            before: its advantages, (N,), or (N, T) of a critic, whose mean is recorded as the completion's.
            after: likewise with credit applied, (N,) or (N, T).
        """
        for item, row in zip(recorded, selected.recorded or (), strict=True):
            completion, length = item.completion, len(item.completion.tokens)
            if completion.group in selected.replaced:
                completion.replaced = True
                continue
            advantage, credit = before[row], after[row]
            completion.advantage = (advantage[:length].sum() / max(length, 1) if advantage.ndim else advantage).item()
            completion.advantages = credit[:length].tolist() if credit.ndim else [credit.item()] * length
            if self.args.token_weights_positive_only and completion.advantage < 0 and completion.weights is not None:
                completion.weights = [1.0] * length

    def write(self, rollout: Rollout, recorded: list[RecordedRow]) -> None:
        """Gather the recorded rows of a rollout, and let the main process write them; every process calls."""
        trainer = self.trainer
        if rollout.recorded is None:
            return
        if trainer.accelerator.num_processes > 1:
            recorded = gather_object(recorded)
        if not trainer.accelerator.is_main_process:
            return
        recorded = sorted(recorded, key=lambda item: item.place)
        record = Record(trainer.state.global_step, trainer.mode, time.time(), [item.completion for item in recorded])
        with self._log_failures():
            self._open_writer(record.step).add(record, dict(chain(*(item.thumbnails.items() for item in recorded))))
        with self._log_failures():
            assert rollout.rewards is not None
            names, weights = trainer.reward_func_names, trainer.reward_weights.cpu()
            self.logs.add(record, summarise_rollout(rollout.rewards.cpu(), names, weights, trainer.newest_metrics()))
        if self.args.colorize_output:
            print_record(record, prompt_length=self.args.prompt_preview_length)

    def log(self, logs: dict[str, Any], mode: str) -> None:
        """Record what the trainer has logged."""
        if self.is_on and self.trainer.accelerator.is_main_process:
            values = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
            entry = LogEntry(self.trainer.state.global_step, mode, time.time(), {**values})
            with self._log_failures():
                self._open_writer(entry.step).log(entry)

    @contextmanager
    def _log_failures(self) -> Iterator[None]:
        """Whatever fails here must not end the training that it describes."""
        try:
            yield
        except Exception as error:
            if type(error) not in self._warned:
                self._warned.add(type(error))
                reason = error_text(error).rstrip(".")
                logger.warning(f"Rollouts cannot be recorded ({reason}); training continues without these records.")

    def _open_writer(self, step: int) -> RecordWriter:
        """Opened at the first record: a run that begins behind step 0 is one that continues."""
        if self._writer is None:
            model = self.trainer.model
            description = {
                "name": self.args.run_name or self.output_dir.resolve().name,
                "rewards": list(self.trainer.reward_func_names),
                "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
                "options": self.args.to_sanitized_dict(),
                "changed": self._changed,
            }
            max_bytes = int(self.args.rollout_log_max_megabytes * 1e6)
            self._writer = RecordWriter(self.output_dir, description, max_bytes, resumed=step > 0)
        return self._writer


def choose_rows(samples: int, num_generations: int, total: int) -> list[int]:
    """Return which of all rows of a rollout batch are recorded: the first two of each prompt, prompt by prompt.

    Two completions of a prompt can be compared; a third says less than another prompt.

    Args:
        total: rows of all processes.
    """
    in_pairs = sorted(range(total), key=lambda row: (row % num_generations // 2, row))
    return sorted(in_pairs[:samples])


def read_row_images(
    row: Mapping[str, Any], grids: Sequence[Grid | None]
) -> tuple[list[RecordedImage], dict[str, bytes], bytes]:
    """Return the images of a row of the data, their thumbnails by name, and a digest; one that is none has no size."""
    recorded: list[RecordedImage] = []
    thumbnails: dict[str, bytes] = {}
    digest = sha1(usedforsecurity=False)
    for value, grid in zip(images_of(row), chain(grids, repeat(None)), strict=False):
        try:
            image = open_image(value)
        except DataError:  # the model has read it all the same, from an address for instance
            recorded.append(RecordedImage(None, 0, 0, grid))
            continue
        digest.update(f"{image.mode} {image.size} ".encode() + image.tobytes())
        name, content = make_thumbnail(image)
        thumbnails[name] = content
        recorded.append(RecordedImage(name, *image.size, grid))
    if len(recorded) == 1:
        size = recorded[0].width, recorded[0].height
        with suppress(DataError):  # the column holds something else
            if boxes := boxes_of(row, size):
                recorded[0].regions = in_pixels(boxes, size) or None
    return recorded, thumbnails, digest.digest()


def make_thumbnail(image: Image.Image) -> tuple[str, bytes]:
    """Return name and content of a WebP file of at most 256 pixels along a side; what is transparent shows white.

    The same picture has the same name.
    """
    small, data = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    if small.has_transparency_data:
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small.convert("RGBA"))
    small.convert("RGB").save(data, "WEBP", quality=WEBP_QUALITY)
    return f"images/{sha1(data.getvalue(), usedforsecurity=False).hexdigest()}.webp", data.getvalue()


def find_image_grids(
    batch: Mapping[str, Any], row: int, merge_size: int | None, num_vision: int | None
) -> list[Grid | None]:
    """Return rows and columns of the vision tokens of each image of a row; None where they are not known.

    Known are the grids that processors of the Qwen family give, and square ones of equal images without tiles.

    Args:
        batch: TRL's, with `num_images`, and `image_grid_thw` (images, 3) or not.
        row: of the batch.
        merge_size: patches per vision token along a side, which belongs to `image_grid_thw`.
        num_vision: vision tokens of the row's prompt; None if they were not counted.
    """
    counts: Sequence[int] = batch.get("num_images") or [0] * (row + 1)
    count, first = counts[row], sum(counts[:row])
    if (grids := batch.get("image_grid_thw")) is not None and merge_size is not None:
        return [
            (height // merge_size, width // merge_size) if time == 1 else None
            for time, height, width in grids[first : first + count].tolist()
        ]
    tiled = any(batch.get(name) is not None for name in ("num_tiles", "image_sizes", "spatial_shapes"))
    side = isqrt(num_vision // count) if num_vision and count and grids is None and not tiled else 0
    return [(side, side) if side and side * side * count == num_vision else None] * count


def quantise_attention(attention: torch.Tensor, grids: Sequence[Grid | None]) -> AttentionMap | None:
    """Return attention (T, V) over vision tokens with a byte per number; None unless the grids have V cells.

    An error is at most 1 / 510 of the largest attention of its token.
    """
    cells = [prod(grid) if grid is not None else 0 for grid in grids]
    if not cells or not all(cells) or sum(cells) != attention.size(1) or not len(attention):
        return None
    attention = attention.float()
    scale = attention.amax(dim=1)  # (T,)
    shares = attention / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    return AttentionMap(scale.tolist(), (shares * 255).round().to(torch.uint8).cpu().numpy().tobytes())


def strip_padding(ids: Sequence[int], mask: Sequence[int], pad_token_id: int) -> list[int]:
    """Return the tokens of a completion; the mask of a truncated one may be empty, then they end before the padding."""
    length = sum(mask) or max((index + 1 for index, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[:length])


def question_id(prompt: str, images: bytes) -> str:
    """Return what is the same for the same prompt with the same images: 16 hexadecimal digits."""
    return sha1(prompt.encode("utf-8", "replace") + b"\0" + images, usedforsecurity=False).hexdigest()[:16]


def split_tokens(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return a piece of text for each token; together they are the text of all tokens.

    A character whose bytes are spread over several tokens belongs to the last of them; the others are empty. So are
    bytes that are no text: those of several tokens in a row belong to the token behind them, or to the last. Each
    token is decoded behind the one before it, because some tokenizers drop the space at the start of a text.
    """
    alone = [decode([token]) for token in ids]
    if "".join(alone) == decode(list(ids)):
        return alone
    pieces: list[str] = []
    before = start = 0  # tokens from `start` on belong to a character that is not finished
    for end in range(1, len(ids) + 1):
        context, text = decode(list(ids[before:start])), decode(list(ids[before:end]))
        waiting = text.endswith("\ufffd") and end < len(ids)  # what the first bytes of a character decode to
        if waiting or not text.startswith(context):
            pieces.append("" if waiting else alone[end - 1])
        else:
            pieces.append(text[len(context) :])
        if not waiting:
            before, start = start, end
    return pieces


def prompt_text(ids: Sequence[int], vision_token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of a prompt, with `<image>` for each run of vision tokens."""
    runs = groupby(ids, key=set(vision_token_ids).__contains__)
    return "".join("<image>" if is_vision else decode(list(run)) for is_vision, run in runs)


def completion_measurements(signals: RolloutSignals, length: int, options: Any) -> dict[str, Any]:
    """Return what was measured of a completion of `length` tokens, by attributes of `Completion`; others are left out.

    Args:
        signals: of this row, (1, T).
        options: `DAPOConfig`.
    """
    columns = {"logps": signals.logps, "entropies": signals.entropies, "dependency": signals.dependency}  # (1, T) each
    found: dict[str, Any] = {}
    if (mass := signals.attention) is not None:
        columns["vgr"] = token_vision_gain_ratio(mass, late_layers(len(mass.vision), options.attention_segments))
        if options.token_weights:
            columns["weights"] = attention_weights(mass, signals.mask, options)
        segments = measure_segments(mass, options.attention_segments, options.mdi_balance_ratio)
        found["metrics"] = reward_columns(segments)["attention_metrics"][0]
    for name, values in columns.items():
        if values is not None and not values[0, :length].isnan().all():  # NaN throughout where nothing was measured
            found[name] = values[0, :length].tolist()
    return found


def accuracy_reward_name(names: Sequence[str]) -> str | None:
    """Return the name of the reward that says whether a completion is right; None if there is none."""
    return next((name for name in names if name.startswith("accuracy")), None)


def summarise_rollout(
    rewards: torch.Tensor, names: Sequence[str], weights: torch.Tensor, metrics: Mapping[str, float]
) -> Summary:
    """Return a rollout batch in numbers.

    Args:
        rewards: (N of all processes, number of functions), NaN where one does not apply.
        weights: of the functions, (number of functions,).
        metrics: of the batch, by the names under which they are logged.
    """
    summary = Summary(len(rewards), {})
    total = (rewards * weights).nansum(dim=1, keepdim=True)  # (N, 1)
    for name, column in zip([*names, "total"], torch.cat([rewards, total], dim=1).double().T, strict=True):
        values = column[~column.isnan()]
        mean = values.mean().item() if len(values) else None
        summary.rewards[name] = mean, values.std().item() if len(values) > 1 else None
        if name == accuracy_reward_name(names) and len(values):
            summary.success_rate = (values == 1).double().mean().item()
    for name, value in metrics.items():
        if found := _SEGMENT_METRIC.fullmatch(name):
            summary.segments.setdefault(found[1], {})[found[2]] = value
        elif name.startswith("token_weight_") or "token_fraction" in name:
            summary.credit[name] = value
    return summary


class RecordBeforeTraining(TrainerCallback):
    """Records the first batch of the evaluation data at step 0, where evaluations will ask the same questions again.

    It costs one rollout, which calls the reward functions, and leaves no other trace: random state, metrics and tables
    of completions are what they were.
    """

    def __init__(self, trainer: ConstructedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer, unless the run continues."""
        trainer = self._trainer
        if state.global_step > 0 or not needs_record_before_training(trainer):
            return
        data, size = _first_eval_dataset(trainer), trainer.args.eval_batch_size
        first = trainer.accelerator.process_index * size
        rows = [data[row] for row in islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]
        metrics, logs = copy.deepcopy(trainer._metrics["eval"]), copy.deepcopy(trainer._logs)
        python, numpy = random.getstate(), np.random.get_state()
        model, device = trainer.model_wrapped, trainer.accelerator.device
        model.eval()
        try:
            with torch.random.fork_rng([device] * (device.type != "cpu")), torch.no_grad():
                trainer._prepare_inputs(rows)
        finally:
            model.train()
            random.setstate(python)
            np.random.set_state(numpy)
            trainer._metrics["eval"], trainer._logs = metrics, logs


def needs_record_before_training(trainer: ConstructedTrainer) -> bool:
    """Whether a run that begins records, evaluates rows of a known number, and does not evaluate at once."""
    args, data = trainer.args, _first_eval_dataset(trainer)
    wanted = args.rollout_log_steps > 0 and not args.eval_on_start and args.eval_strategy != "no"
    return wanted and hasattr(data, "__len__") and len(data) > 0


def _first_eval_dataset(trainer: ConstructedTrainer) -> Any:
    data = trainer.eval_dataset
    return next(iter(data.values()), None) if isinstance(data, dict) else data
