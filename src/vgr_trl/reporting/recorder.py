"""Recording rollouts during training: a few rows of a batch, written in a thread as records, Markdown and printed text.

In the order of a rollout: `rows_due` says which rows are recorded, `snapshot` copies them once their rewards are known,
`add_credit` adds what the loss reads of them, and `write` gathers them and lets the main process write them.
"""

import copy
import io
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha1
from itertools import cycle, groupby, islice
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import logging

from vgr_trl.config import LOG_OPTIONS
from vgr_trl.credit import attention_weights
from vgr_trl.data.columns import images_of
from vgr_trl.data.images import boxes_of, open_image
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
from vgr_trl.signals.named import QUANTITIES, RolloutSignals, map_signals, measure_segments, reward_columns
from vgr_trl.signals.ratios import late_layers, token_vision_gain_ratio
from vgr_trl.signals.regions import in_pixels
from vgr_trl.utils import ConfigError, DataError, error_text

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)

LONGEST_SIDE = 256  # of a thumbnail, in pixels
QUALITY = 80  # of WebP, of 100: about 5 kB for a photograph of that size
_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(QUANTITIES)})")

Grid = tuple[int, int]
Decode = Callable[[list[int]], str]  # keeps special tokens, does not clean up


@dataclass
class RowSnapshot:
    """A recorded row of a rollout batch, on the CPU.

    Attributes:
        place: among the rows of all processes.
        prompt, ids: tokens of prompt and completion, without padding.
        completion: what is known of it before the thread decodes its tokens and adds what was measured.
        thumbnails: of the images of the prompt, then of the images as they were perturbed, if they were.
        digest: of the images.
        rewards: of each function, NaN where one does not apply.
        signals: of this row, (1, T); None: nothing was measured.
    """

    place: int
    prompt: list[int]
    ids: list[int]
    completion: Completion
    thumbnails: list[Image.Image | None]
    digest: bytes
    rewards: list[float]
    signals: RolloutSignals | None


class RolloutRecorder:
    """Records a few completions of rollouts, in a thread of the main process.

    Every process takes part in what is gathered, at the same steps.

    Raises:
        ConfigError: a file or folder cannot be written, or a log is asked for that nothing is measured for.
    """

    def __init__(self, trainer: "DAPOTrainer") -> None:
        self.trainer, self.args = trainer, trainer.args
        self.is_on = self.args.rollout_log_steps > 0
        self.output_dir = Path(str(self.args.output_dir))
        has_attention = "attention" in trainer.measurement.needed
        self.logs = MarkdownLogs(self.args, time.strftime("%Y%m%d_%H%M%S"), has_attention)
        self._last: dict[str, int | None] = {"train": None, "eval": None}  # step of the last record
        self._executor = ThreadPoolExecutor(1, "vgr_trl-records")
        self._job: Future[None] | None = None
        self._opened: RecordWriter | None = None
        self._warned: set[type] = set()
        for option, is_measured, cure in (
            ("attention_diag_log_path", has_attention, "compute_attention_metrics"),
            ("token_weights_log_path", self.args.token_weights, "token_weights"),
        ):
            if self.is_on and getattr(self.args, option) is not None and not is_measured:
                raise ConfigError(
                    f"{option} is {getattr(self.args, option)}, but nothing is measured for it: switch {cure} on, or "
                    f"leave {option} out."
                )
        if self.is_on and trainer.accelerator.is_main_process:
            refuse_unwritable(self.output_dir / FOLDER, "output_dir", is_folder=True)
            for option in LOG_OPTIONS:
                if (path := getattr(self.args, option)) is not None:
                    refuse_unwritable(Path(path), option)

    def rows_due(self, rows: int) -> tuple[int, ...] | None:
        """Return which rows of this process are recorded of a rollout that begins; None if none is in any process.

        Args:
            rows: completions of each process.
        """
        trainer, mode, step = self.trainer, self.trainer.mode, self.trainer.state.global_step
        last, every = self._last[mode], self.args.rollout_log_steps
        # Of each evaluation the first batch; in training the first one after every so many steps.
        if not self.is_on or (last is not None and (mode == "eval" or step // every == last // every)):
            return None
        self._last[mode] = step
        first, total = trainer.accelerator.process_index * rows, rows * trainer.accelerator.num_processes
        chosen = rows_to_record(self.args.rollout_log_samples, trainer.completions_per_prompt, total)
        return tuple(row - first for row in chosen if first <= row < first + rows)

    def evaluated(self) -> None:
        """An evaluation is over: the next one is recorded again."""
        self._last["eval"] = None

    def snapshot(self, rollout: Rollout) -> list[RowSnapshot]:
        """Return the recorded rows of a rollout whose rewards are known, before groups are selected and credited."""
        trainer, batch, chosen = self.trainer, rollout.batch, list(rollout.recorded or ())
        first = trainer.accelerator.process_index * len(rollout.rows)
        merge_size = getattr(getattr(trainer.processing_class, "image_processor", None), "merge_size", None)
        signals = rollout.signals
        if signals is not None and chosen:
            signals = map_signals([signals], lambda tensors: tensors[0][chosen].cpu())
        images: dict[int, tuple[list[RecordedImage], list[Image.Image | None], bytes]] = {}
        snapshots = []
        for index, row in enumerate(chosen):
            assert rollout.rewards is not None
            own = None if signals is None else map_signals([signals], lambda of, i=index: of[0][i : i + 1])  # type: ignore[misc]
            num_vision = None if own is None or own.attention is None else int(own.attention.num_vision)
            grids = grids_of_row(batch, row, merge_size, num_vision)
            group = (first + row) // trainer.completions_per_prompt
            if group not in images:  # the completions of a prompt were shown the same
                images[group] = images_of_row(rollout.rows[row], grids)
            recorded, thumbnails, digest = images[group]
            perturbed = [] if rollout.perturbed_images is None else rollout.perturbed_images[row]
            ids, mask = batch["completion_ids"][row].tolist(), batch["completion_mask"][row].tolist()
            ids = without_padding(ids, mask, trainer._tokenizer.pad_token_id)
            completion = Completion("", group, "", "", [], advantage=batch["advantages"][row].item())
            completion.images = [replace(image) for image in recorded]
            if (solution := rollout.rows[row].get("solution")) is not None:
                completion.solution = str(solution)
            if rollout.changes is not None and recorded:
                completion.changes = rollout.changes[row, : len(ids)].tolist()
            if rollout.maps is not None and row in rollout.maps:
                completion.attention = quantised(rollout.maps[row].mean(0)[: len(ids)], grids)
            snapshots.append(
                RowSnapshot(
                    place=first + row,
                    prompt=batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist(),
                    ids=ids,
                    completion=completion,
                    thumbnails=[*thumbnails, *map(shrunk, perturbed)],
                    digest=digest,
                    rewards=rollout.rewards[first + row].tolist(),
                    signals=own,
                )
            )
        return snapshots

    def write(self, rollout: Rollout, snapshots: list[RowSnapshot]) -> None:
        """Gather the recorded rows of a rollout, and let the main process write them; every process calls."""
        if rollout.recorded is None:
            return
        trainer = self.trainer
        if trainer.accelerator.num_processes > 1:
            snapshots = gather_object(snapshots)
        if trainer.accelerator.is_main_process:
            assert rollout.rewards is not None
            record = Record(trainer.state.global_step, trainer.mode, time.time(), [])
            rewards, weights = rollout.rewards.detach().clone().cpu(), trainer.reward_weights.tolist()
            self._submit(self._write, record, snapshots, rewards, weights, trainer.newest_metrics())

    def log(self, logs: dict[str, Any], mode: str) -> None:
        """Record what the trainer has logged."""
        if self.is_on and self.trainer.accelerator.is_main_process:
            values: dict[str, float | None] = {
                name: float(value) for name, value in logs.items() if isinstance(value, (int, float))
            }
            entry = LogEntry(self.trainer.state.global_step, mode, time.time(), values)
            self._submit(lambda: self._writer(entry.step).log(entry))

    def flush(self) -> None:
        """Wait until everything so far is on disk."""
        if self._job is not None:
            self._job.result()

    def _submit(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread, after those before; at the end of the interpreter those that wait are run."""
        self._job = self._executor.submit(self._call, function, args)

    # In the thread

    def _call(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception as error:  # whatever it is, it must not end the training that it describes
            if type(error) not in self._warned:
                self._warned.add(type(error))
                reason = error_text(error).rstrip(".")
                logger.warning(f"Rollouts cannot be recorded ({reason}); training continues without these records.")

    def _writer(self, step: int) -> RecordWriter:
        """Opened at the first record: a run that begins behind step 0 is one that continues."""
        if self._opened is None:
            model = self.trainer.model
            description = {
                "name": self.args.run_name or self.output_dir.resolve().name,
                "rewards": list(self.trainer.reward_func_names),
                "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
                "options": self.args.to_sanitized_dict(),
            }
            max_bytes = int(self.args.rollout_log_max_megabytes * 1e6)
            self._opened = RecordWriter(self.output_dir, description, max_bytes, resumed=step > 0)
        return self._opened

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy: the Rust part of a tokenizer that one thread pads with refuses another thread."""
        tokenizer: PreTrainedTokenizerBase = copy.deepcopy(self.trainer._tokenizer)
        return tokenizer

    def _write(
        self,
        record: Record,
        snapshots: list[RowSnapshot],
        rewards: torch.Tensor,
        weights: list[float],
        metrics: dict[str, float],
    ) -> None:
        files: dict[str, bytes] = {}
        names: dict[int, str] = {}  # completions of a prompt share their thumbnails
        for row in sorted(snapshots, key=lambda row: row.place):
            completion = self._completion(row, weights)
            record.completions.append(completion)
            places = [(image, name) for name in ("file", "perturbed") for image in completion.images]
            for (image, name), thumbnail in zip(places, row.thumbnails, strict=False):
                if thumbnail is not None:
                    if id(thumbnail) not in names:
                        names[id(thumbnail)], content = thumbnail_file(thumbnail)
                        files[names[id(thumbnail)]] = content
                    setattr(image, name, names[id(thumbnail)])
        try:
            self._writer(record.step).add(record, files)
        finally:
            self.logs.add(record, summary_of(rewards, self.trainer.reward_func_names, torch.tensor(weights), metrics))
            if self.args.colorize_output:
                print_record(record, prompt_length=self.args.prompt_preview_length)

    def _completion(self, row: RowSnapshot, weights: list[float]) -> Completion:
        def exactly(tokens: list[int]) -> str:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

        names, found = self.trainer.reward_func_names, row.completion
        measured = {} if row.signals is None else measures_of_row(row.signals, len(row.ids), self.args)
        found = replace(found, **measured)
        is_negative = found.advantages is not None and (found.advantage or 0) < 0
        if self.args.token_weights_positive_only and is_negative and found.weights is not None:
            found.weights = [1.0] * len(row.ids)
        found.prompt = prompt_text(row.prompt, self.trainer.measurement.vision_token_ids, exactly)
        found.question = question_id(found.prompt, row.digest)
        found.text = str(self._tokenizer.decode(row.ids, skip_special_tokens=True))
        found.tokens = token_pieces(row.ids, exactly)
        rewards = dict(zip(names, row.rewards, strict=True))
        accuracy = rewards.get(accuracy_name(names) or "", math.nan)
        found.rewards, found.correct = {**rewards}, None if math.isnan(accuracy) else accuracy == 1
        weighted = (value * weight for value, weight in zip(row.rewards, weights, strict=True))
        found.reward = sum(value for value in weighted if not math.isnan(value))
        return found


def add_credit(snapshots: list[RowSnapshot], selected: Rollout, before: torch.Tensor, after: torch.Tensor) -> None:
    """Add to recorded rows what the loss reads of them.

    Args:
        selected: the rollout after groups were selected.
        before: its advantages, (N,), or (N, T) of a critic, whose mean is recorded as the completion's.
        after: likewise with credit applied, (N,) or (N, T).
    """
    for snapshot, row in zip(snapshots, selected.recorded or (), strict=True):
        found, length = snapshot.completion, len(snapshot.ids)
        if found.group in selected.replaced:
            found.replaced = True
            continue
        advantage, credit = before[row], after[row]
        found.advantage = (advantage[:length].sum() / max(length, 1) if advantage.ndim else advantage).item()
        found.advantages = credit[:length].tolist() if credit.ndim else [credit.item()] * length


def rows_to_record(samples: int, num_generations: int, total: int) -> list[int]:
    """Return which of all rows of a rollout batch are recorded: the first two of each prompt, prompt by prompt.

    Two completions of a prompt can be compared; a third tells less than another prompt.

    Args:
        total: rows of all processes.
    """
    in_pairs = sorted(range(total), key=lambda row: (row % num_generations // 2, row))
    return sorted(in_pairs[:samples])


def images_of_row(
    row: Mapping[str, Any], grids: Sequence[Grid | None]
) -> tuple[list[RecordedImage], list[Image.Image | None], bytes]:
    """Return the images of a row of the data, their thumbnails, and a digest of all; one that is none has no size."""
    recorded: list[RecordedImage] = []
    thumbnails: list[Image.Image | None] = []
    digest = sha1(usedforsecurity=False)
    for index, value in enumerate(images_of(row)):
        grid = grids[index] if index < len(grids) else None
        try:
            image = open_image(value)
        except DataError:  # the model has read it all the same, from an address for instance
            recorded.append(RecordedImage(None, 0, 0, grid))
            thumbnails.append(None)
            continue
        digest.update(f"{image.mode} {image.size} ".encode() + image.tobytes())
        recorded.append(RecordedImage(None, *image.size, grid))
        thumbnails.append(shrunk(image))
    if len(recorded) == 1:
        size = recorded[0].width, recorded[0].height
        with suppress(DataError):  # the column holds something else
            recorded[0].regions = in_pixels(boxes_of(row, size), size) or None
    return recorded, thumbnails, digest.digest()


def grids_of_row(
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


def quantised(attention: torch.Tensor, grids: Sequence[Grid | None]) -> AttentionMap | None:
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


def without_padding(ids: Sequence[int], mask: Sequence[int], pad_token_id: int) -> list[int]:
    """Return the tokens of a completion; the mask of a truncated one may be empty, then they end before the padding."""
    length = sum(mask) or max((index + 1 for index, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[:length])


def shrunk(image: Image.Image) -> Image.Image:
    """Return an RGB copy of `image` whose longer side has at most 256 pixels; what is transparent shows white."""
    small = image.copy()
    if (ratio := LONGEST_SIDE / max(image.size)) < 1:
        size = max(1, round(image.width * ratio)), max(1, round(image.height * ratio))
        small = image.resize(size, reducing_gap=2.0)
    if small.has_transparency_data:
        opaque = Image.new("RGBA", small.size, "white")
        opaque.alpha_composite(small.convert("RGBA"))
        small = opaque
    return small.convert("RGB")


def thumbnail_file(image: Image.Image) -> tuple[str, bytes]:
    """Return name and content of the file of a shrunk image: the same picture has the same name."""
    data = io.BytesIO()
    image.save(data, "WEBP", quality=QUALITY)
    return f"images/{sha1(data.getvalue(), usedforsecurity=False).hexdigest()}.webp", data.getvalue()


def question_id(prompt: str, images: bytes) -> str:
    """Return what is the same for the same prompt with the same images: 16 hexadecimal digits."""
    return sha1(prompt.encode("utf-8", "replace") + b"\0" + images, usedforsecurity=False).hexdigest()[:16]


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
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


def measures_of_row(signals: RolloutSignals, length: int, options: Any) -> dict[str, Any]:
    """Return what was measured of a completion of `length` tokens, as `Completion` has it.

    Args:
        signals: of this row, (1, T).
        options: `DAPOConfig`.
    """
    columns = {"logps": signals.logps, "entropies": signals.entropies, "dependency": signals.dependency}
    found: dict[str, Any] = {}
    for name, values in columns.items():  # NaN throughout where they were not measured
        if values is not None and not values[0, :length].isnan().all():
            found[name] = values[0, :length].tolist()
    if (mass := signals.attention) is not None:
        vgr = token_vision_gain_ratio(mass, late_layers(len(mass.vision), options.attention_segments))
        segments = measure_segments(mass, options.attention_segments, options.mdi_balance_ratio)
        found |= {"vgr": vgr[0, :length].tolist(), "metrics": reward_columns(segments)["attention_metrics"][0]}
        if options.token_weights:
            found["weights"] = attention_weights(mass, signals.mask, options)[0, :length].tolist()
    return found


def accuracy_name(names: Sequence[str]) -> str | None:
    """Return the name of the reward that says whether a completion is right; None if there is none."""
    return next((name for name in names if name.startswith("accuracy")), None)


def summary_of(
    rewards: torch.Tensor, names: Sequence[str], weights: torch.Tensor, metrics: Mapping[str, float]
) -> Summary:
    """Return a rollout batch in numbers.

    Args:
        rewards: (N of all processes, number of functions), NaN where one does not apply.
        weights: of the functions, (number of functions,).
        metrics: of the batch, by the names under which they are logged.
    """
    total = (rewards * weights).nansum(dim=1, keepdim=True)  # (N, 1)
    statistics: dict[str, tuple[float | None, float | None]] = {}
    success = None
    for name, column in zip([*names, "total"], torch.cat([rewards, total], dim=1).double().T, strict=True):
        values = column[~column.isnan()]
        mean = values.mean().item() if len(values) else None
        statistics[name] = mean, values.std().item() if len(values) > 1 else None
        if name == accuracy_name(names) and len(values):
            success = (values == 1).double().mean().item()
    segments: dict[str, dict[str, float | None]] = {}
    for name, value in metrics.items():
        if found := _SEGMENT_METRIC.fullmatch(name):
            segments.setdefault(found[1], {})[found[2]] = value
    credit: dict[str, float | None] = {
        name: value for name, value in metrics.items() if name.startswith("token_weight_") or "token_fraction" in name
    }
    return Summary(len(rewards), statistics, success, segments, credit)


class FlushRecords(TrainerCallback):
    """Lets nothing be lost that was recorded before a checkpoint, or before the end."""

    def __init__(self, recorder: RolloutRecorder) -> None:
        self.recorder = recorder

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Let the next evaluation be recorded."""
        self.recorder.evaluated()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Write what waits."""
        self.recorder.flush()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Write what waits."""
        self.recorder.flush()


class RecordBefore(TrainerCallback):
    """Records the first batch of the evaluation data at step 0, where evaluations will ask the same questions again.

    It costs one rollout, which calls the reward functions, and leaves no other trace: random state, metrics and tables
    of completions are what they were.

    Args:
        on_recorded: called afterwards.
    """

    def __init__(self, trainer: ConstructedTrainer, on_recorded: Callable[[], None]) -> None:
        self._trainer, self._on_recorded = trainer, on_recorded

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Answer, unless the run continues."""
        trainer = self._trainer
        if state.global_step > 0 or not is_recorded_before(trainer):
            return
        data, size = _evaluated(trainer), trainer.args.eval_batch_size
        first = trainer.accelerator.process_index * size
        rows = [data[row] for row in islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]
        model = trainer.model_wrapped
        model.eval()
        try:
            with _untouched(trainer), torch.no_grad():
                trainer._prepare_inputs(rows)
        finally:
            model.train()
            self._on_recorded()


def is_recorded_before(trainer: ConstructedTrainer) -> bool:
    """Whether a run that begins has rows of a known number to evaluate on, records, and does not evaluate at once."""
    args, data = trainer.args, _evaluated(trainer)
    asked = args.rollout_log_steps > 0 and not args.eval_on_start and args.eval_strategy != "no"
    return asked and hasattr(data, "__len__") and len(data) > 0


def _evaluated(trainer: ConstructedTrainer) -> Any:
    data = trainer.eval_dataset
    return next(iter(data.values()), None) if isinstance(data, dict) else data


@contextmanager
def _untouched(trainer: ConstructedTrainer) -> Iterator[None]:
    metrics, logs = copy.deepcopy(trainer._metrics["eval"]), copy.deepcopy(trainer._logs)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        trainer._metrics["eval"], trainer._logs = metrics, logs
