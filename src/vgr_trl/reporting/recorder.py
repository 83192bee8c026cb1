"""Recording rollouts during training: rows as text, numbers and thumbnails, written in the background."""

import atexit
import copy
import io
import math
import queue
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha1
from itertools import cycle, islice
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import logging

from vgr_trl.added_loss import PENALTY
from vgr_trl.batch import RolloutSignals, map_signals
from vgr_trl.config import LOG_OPTIONS
from vgr_trl.credit import attention_weights
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.columns import images_of
from vgr_trl.data.images import boxes_of, open_image
from vgr_trl.reporting.markdown import MarkdownLogs, Segments, Summary, markdown_logs, print_record
from vgr_trl.reporting.model_card import About, extended_card
from vgr_trl.reporting.records import (
    FOLDER,
    AttentionMap,
    Completion,
    LogEntry,
    Numbers,
    Record,
    RecordedImage,
    RecordFiles,
    prompt_text,
    refuse_unwritable,
    token_pieces,
)
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.signals.named import QUANTITIES, measure_segments, reward_columns
from vgr_trl.signals.ratios import late_layers, token_vision_gain_ratio
from vgr_trl.signals.regions import in_pixels
from vgr_trl.utils import ConfigError, DataError, VGRError

# ---------------------------------------------------------------------------------------------------------------------
# Jobs that run one after the other in a thread, so that training does not wait for a disk.


if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs in their order, in a thread that starts with the first and that `close` ends.

    A job that a disk refuses (`OSError`) waits, and those behind it, until the next one comes, then is run again. A job
    that fails otherwise is left out, as is the oldest where too many wait. The first failure of each kind is warned of,
    and at the end how many were left out. At the end of the interpreter, also after an exception, what waits is run.

    Args:
        what: the jobs write, for the warning.
        most_waiting: jobs that may wait.
        patience: seconds that `flush` and `close` wait for a disk that does not answer.
        at_exit: returns what is called at the end of the interpreter, or None as a weak reference does; by default it
            is `close`.
    """

    def __init__(
        self,
        what: str,
        most_waiting: int = 64,
        patience: float = 60.0,
        at_exit: Callable[[], Job | None] = lambda: None,
    ) -> None:
        self.what, self.most_waiting, self.patience, self.at_exit = what, most_waiting, patience, at_exit
        self.left_out = 0
        self._said: set[str] = set()
        self._queue: queue.Queue[Job | threading.Event | None] = queue.Queue(most_waiting)
        self._refused: deque[Job] = deque()  # by a disk; only the thread touches it
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Let `job` run when those before it are done; leave it out if too many wait."""
        self._start()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self.left_out += 1
            self._warn(
                "too fast",
                f"{self.what} are made faster than they can be written, so some are left out: log less often, or "
                "to a faster disk.",
            )

    def flush(self) -> None:
        """Wait until every job so far is done, or refused by a disk."""
        if self._thread is None:
            return
        done = threading.Event()
        try:
            self._queue.put(done, timeout=self.patience)
        except queue.Full:
            return
        done.wait(self.patience)

    def close(self) -> None:
        """Wait until every job is done, end the thread, and say what is lost; a later job starts another."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=self.patience)
        except queue.Full:
            return
        self._thread.join(self.patience)
        if not self._thread.is_alive():
            self._thread = None
            atexit.unregister(self._exit)

    def _exit(self) -> None:
        (self.at_exit() or self.close)()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="vgr_trl-records", daemon=True)
            self._thread.start()
            atexit.unregister(self._exit)
            atexit.register(self._exit)

    # In the thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if not isinstance(job, threading.Event):
                self._refused.append(job)
            self._work_off()
            if isinstance(job, threading.Event):
                job.set()
            del job  # or what it holds would live until the next one comes
        self._work_off()
        self._say_what_is_lost()

    def _work_off(self) -> None:
        while self._refused:
            try:
                self._refused[0]()
            except OSError as error:
                self._warn(
                    type(error).__name__,
                    f"{self.what} cannot be written ({_words(error)}); training goes on, and they are written as soon "
                    "as they can be.",
                )
                if len(self._refused) <= self.most_waiting:
                    return
                self.left_out += 1
            except Exception as error:  # whatever it is, it must not end the training that it describes
                self.left_out += 1
                self._warn(
                    type(error).__name__,
                    f"{self.what} cannot be written ({_words(error)}); training goes on without this one.",
                )
            self._refused.popleft()

    def _say_what_is_lost(self) -> None:
        lost = self.left_out + len(self._refused)
        if lost:
            logger.warning(f"{self.what}: {lost} of what was to be written is lost; the warnings before say why.")
        self._refused.clear()
        self.left_out = 0

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(message)


def _words(error: Exception) -> str:
    return str(error).rstrip(".") if isinstance(error, VGRError) else f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------------------------------------------
# Small pictures of a prompt's images, named by what they show.


LONGEST_SIDE = 256  # pixels
QUALITY = 80  # of WebP, of 100: about 5 kB for a photograph of that size


def shrunk(image: Image.Image) -> Image.Image:
    """Return an RGB copy of `image` whose longer side has at most 256 pixels; what is transparent shows white."""
    small = image.copy() if max(image.size) <= LONGEST_SIDE else image
    if small is image:
        ratio = LONGEST_SIDE / max(image.size)
        small = image.resize(
            (max(1, round(image.width * ratio)), max(1, round(image.height * ratio))), reducing_gap=2.0
        )
    if small.has_transparency_data:
        shown = Image.new("RGBA", small.size, "white")
        shown.alpha_composite(small.convert("RGBA"))
        small = shown
    return small.convert("RGB")


def thumbnail_file(image: Image.Image) -> tuple[str, bytes]:
    """Return name and content of the file of a shrunk image: the same picture has the same name."""
    data = io.BytesIO()
    image.save(data, "WEBP", quality=QUALITY)
    content = data.getvalue()
    return f"images/{sha1(content, usedforsecurity=False).hexdigest()}.webp", content


# ---------------------------------------------------------------------------------------------------------------------
# Where records go: the folder of the run, Markdown files, the terminal; written in a thread.


@dataclass(frozen=True)
class Finished:
    """A record as it is written.

    Attributes:
        record: whose images get the names of their files on the way.
        thumbnails: per completion, per image; then as perturbed, if they were.
        summary: the batch in numbers.
    """

    record: Record
    thumbnails: Sequence[Sequence[Image.Image | None]]
    summary: Summary


class _Coming:
    """A record that is finished when it is first asked for, in the thread that writes."""

    def __init__(self, finish: Callable[[], Finished]) -> None:
        self._finish: Callable[[], Finished] | None = finish
        self.finished: Finished | None = None

    def get(self) -> Finished:
        if self.finished is None:
            assert self._finish is not None
            self.finished = self._finish()
            self._finish = None  # with the images that it holds
        return self.finished


class RecordSink:
    """Takes records from the training thread and writes them in another.

    Args:
        description: of the run, for `run.json`.
        max_bytes: bound of records and thumbnails.
        at_once: whether Markdown files and terminal get a record when it comes, not at the next log.
        print_length: characters of prompts on the terminal, None: all.
        prints: whether records are printed.
    """

    def __init__(
        self,
        output_dir: Path,
        description: Mapping[str, Any],
        max_bytes: int,
        *,
        logs: MarkdownLogs,
        at_once: bool = False,
        prints: bool = False,
        print_length: int | None = None,
    ) -> None:
        self.output_dir, self.description, self.max_bytes = output_dir, description, max_bytes
        self.logs, self.at_once, self.prints, self.print_length = logs, at_once, prints, print_length
        self._unshown: list[_Coming] = []
        self._files: RecordFiles | None = None
        self._background = Background("Rollouts", at_exit=WeakMethod(self.close))

    def add(self, finish: Callable[[], Finished]) -> None:
        """Take what returns a record; the thread calls it."""
        coming = _Coming(finish)
        self._background.put(partial(self._write, coming))
        self._unshown.append(coming)
        if self.at_once:
            self._show()

    def log(self, entry: LogEntry) -> None:
        """Take what the trainer has logged."""
        self._show()
        self._background.put(partial(self._write_log, entry))

    def flush(self) -> None:
        """Wait until everything so far is on disk."""
        self._show()
        self._background.flush()

    def close(self) -> None:
        """As `flush`, and end the thread; a later record starts another."""
        self._show()
        self._background.close()

    def _show(self) -> None:
        for coming in self._unshown:
            if self.logs.wanted:
                self._background.put(partial(self._write_logs, coming))
            if self.prints:
                self._print(coming)
        self._unshown.clear()

    def _print(self, coming: _Coming) -> None:
        self._background.flush()
        if coming.finished is not None:
            print_record(coming.finished.record, prompt_length=self.print_length)

    # In the thread

    def _write(self, coming: _Coming) -> None:
        finished, files = coming.get(), dict[str, bytes]()
        encoded: dict[int, str] = {}  # completions of a prompt share their images
        for completion, shown in zip(finished.record.completions, finished.thumbnails, strict=True):
            places = [(image, name) for name in ("file", "perturbed") for image in completion.images]
            for (image, name), thumbnail in zip(places, shown, strict=False):
                if thumbnail is None:
                    continue
                if id(thumbnail) not in encoded:
                    encoded[id(thumbnail)], content = thumbnail_file(thumbnail)
                    files[encoded[id(thumbnail)]] = content
                setattr(image, name, encoded[id(thumbnail)])
        self._opened(finished.record.step).add(finished.record, files)

    def _write_logs(self, coming: _Coming) -> None:
        self.logs.add(coming.get().record, coming.get().summary)

    def _write_log(self, entry: LogEntry) -> None:
        self._opened(entry.step).log(entry)

    def _opened(self, step: int) -> RecordFiles:
        """The files, opened at the first record: a run that begins behind step 0 is one that goes on."""
        if self._files is None:
            self._files = RecordFiles(self.output_dir, self.description, self.max_bytes, resumed=step > 0)
        return self._files


# ---------------------------------------------------------------------------------------------------------------------
# What the policy answered before its first step: the questions that every evaluation asks first, for the records.


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
        """Answer, unless the run goes on."""
        trainer = self._trainer
        if state.global_step > 0 or not is_recorded_before(trainer):
            return
        model = trainer.model_wrapped
        model.eval()
        try:
            with _untouched(trainer), torch.no_grad():
                trainer._prepare_inputs(_first_rows(trainer))
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


def _first_rows(trainer: ConstructedTrainer) -> list[Any]:
    """The rows that this process gets first in an evaluation."""
    data = _evaluated(trainer)
    size, accelerator = trainer.args.eval_batch_size, trainer.accelerator
    first = accelerator.process_index * size
    return [data[row] for row in islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]


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


# ---------------------------------------------------------------------------------------------------------------------
# The model card of a run.


def rewards_of(trainer: ConstructedTrainer) -> list[str]:
    """Return the names of the rewards that a user has given."""
    return [name for name in trainer.reward_func_names if name != PENALTY]


def extend_card(trainer: ConstructedTrainer, name: str | None, data: str | None) -> None:
    """Add to the card that TRL has written: rewards, the options that were on, the papers to cite; origin and use."""
    file = Path(str(trainer.args.output_dir), "README.md")
    card = extended_card(
        file.read_text(encoding="utf-8"), trainer.args, rewards_of(trainer), about_trainer(trainer, name, data)
    )
    file.write_text(card, encoding="utf-8")


def about_trainer(trainer: ConstructedTrainer, name: str | None, data: str | None) -> About:
    """Return what a constructed `DAPOTrainer` trains, and from what."""
    args, rows = trainer.args, trainer.train_dataset
    folder = Path(str(args.output_dir)).resolve().name
    counted = hasattr(rows, "__len__") and len(rows) > 0
    return About(
        name=name or folder,
        where=args.hub_model_id or str(args.output_dir),
        base=getattr(trainer.model.config, "_name_or_path", None) or None,
        data=data,
        rows=len(rows) if counted else None,
        system=_system_prompt(rows[0]) if counted else None,
        reads_images=bool(trainer._is_vlm),
        length=args.max_completion_length or 512,
    )


def _system_prompt(row: Mapping[str, Any]) -> str | None:
    prompt = row.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if not isinstance(first, Mapping) or first.get("role") != "system":
        return None
    content = first["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


# ---------------------------------------------------------------------------------------------------------------------
# Images of recorded rows: thumbnails, grids of vision tokens, and attention over these.


Grid = tuple[int, int]
Pictures = tuple[list[RecordedImage], list[Image.Image | None], bytes]


def images_of_row(row: Mapping[str, Any], grids: Sequence[Grid | None]) -> Pictures:
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
        recorded[0].regions = _regions(row, (recorded[0].width, recorded[0].height))
    return recorded, thumbnails, digest.digest()


def _regions(row: Mapping[str, Any], size: tuple[int, int]) -> list[tuple[float, float, float, float]] | None:
    """Boxes as left, top, width, height in pixels; None of columns that hold something else."""
    try:
        return in_pixels(boxes_of(row, size), size) or None
    except DataError:
        return None


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
    count = counts[row]
    if not count:
        return []
    first = sum(counts[:row])
    grids = batch.get("image_grid_thw")
    if grids is not None:
        if merge_size is None:
            return [None] * count
        return [
            (height // merge_size, width // merge_size) if time == 1 else None
            for time, height, width in grids[first : first + count].tolist()
        ]
    cut = any(batch.get(name) is not None for name in ("num_tiles", "image_sizes", "spatial_shapes"))
    if cut or not num_vision or num_vision % count:
        return [None] * count
    side = isqrt(num_vision // count)
    return [(side, side) if side * side * count == num_vision else None] * count


def quantised(attention: torch.Tensor, grids: Sequence[Grid | None]) -> AttentionMap | None:
    """Return attention (T, V) over vision tokens with a byte per number; None unless the grids have V cells.

    An error is at most 1 / 510 of the largest attention of its token.
    """
    known = [grid for grid in grids if grid is not None]
    if len(known) != len(grids) or not known or sum(map(prod, known)) != attention.size(1) or not len(attention):
        return None
    attention = attention.float()
    scale = attention.amax(dim=1)  # (T,)
    shares = attention / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    values = (shares * 255).round().to(torch.uint8)
    return AttentionMap(scale.tolist(), values.cpu().numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------------------
# Recorded rows as training leaves them: no more than what is gone a moment later, in memory of the host.


@dataclass
class TakenRow:
    """A row of a rollout batch that becomes a completion of a record.

    Attributes:
        place: among the rows of all processes.
        group: number of its prompt.
        prompt, completion: tokens, without padding.
        pictures: of the prompt; called by the thread that writes, or called already, before they are sent.
        perturbed: images as they were perturbed for the dependency.
        attention: over the vision tokens.
        changes: of the log-probabilities when images are perturbed.
        solution: of the data.
        earned: what the reward functions gave, NaN where one does not apply.
        advantage, advantages: of the completion, and of its tokens as the loss reads them; None: not trained on.
        replaced: whether another group took its place.
    """

    place: int
    group: int
    prompt: list[int]
    completion: list[int]
    pictures: Callable[[], Pictures] | Pictures
    solution: Any
    earned: list[float]
    advantage: float
    perturbed: list[Image.Image] = field(default_factory=list)
    attention: AttentionMap | None = None
    changes: Numbers | None = None
    advantages: Numbers | None = None
    replaced: bool = False


@dataclass
class TakenRows:
    """The recorded rows of one process, and their signals (R, T) on the CPU; None: nothing was measured."""

    rows: list[TakenRow]
    signals: RolloutSignals | None


def take_rows(
    rollout: Rollout, first: int, num_generations: int, pad_token_id: int, merge_size: int | None
) -> TakenRows:
    """Return the recorded rows of a judged rollout, before groups are replaced and credit is spread.

    Args:
        first: place of its first row among those of all.
        merge_size: patches per vision token along a side, where processors of the Qwen family have one.
    """
    chosen = list(rollout.recorded or ())
    if not chosen:
        return TakenRows([], None)
    batch = rollout.batch
    signals = rollout.signals
    if signals is not None:
        signals = map_signals([signals], lambda of_rows: of_rows[0][chosen].cpu())
    counts = [None] * len(chosen)
    if signals is not None and signals.attention is not None:
        counts = signals.attention.num_vision.tolist()
    prompts = zip(*(batch[name][chosen].tolist() for name in ("prompt_ids", "prompt_mask")), strict=True)
    completions = zip(*(batch[name][chosen].tolist() for name in ("completion_ids", "completion_mask")), strict=True)
    advantages = batch["advantages"][chosen].tolist()
    assert rollout.rewards is not None
    earned = rollout.rewards[[first + row for row in chosen]].tolist()
    changes = None if rollout.changes is None else rollout.changes[chosen].tolist()
    pictures: dict[int, Callable[[], Pictures]] = {}
    taken = []
    for index, (row, prompt, completion) in enumerate(zip(chosen, prompts, completions, strict=True)):
        group = (first + row) // num_generations
        grids = grids_of_row(batch, row, merge_size, counts[index])
        data, ids = rollout.rows[row], without_padding(completion[0], completion[1], pad_token_id)
        attention = (rollout.maps or {}).get(row)
        taken.append(
            TakenRow(
                place=first + row,
                group=group,
                prompt=[token for token, counts_in in zip(*prompt, strict=True) if counts_in],
                completion=ids,
                # The completions of a prompt were shown the same images.
                pictures=pictures.setdefault(group, cache(partial(images_of_row, data, grids))),
                solution=data.get("solution"),
                earned=earned[index],
                advantage=advantages[index],
                perturbed=[] if rollout.perturbed_images is None else list(rollout.perturbed_images[row]),
                attention=None if attention is None else quantised(attention.mean(0)[: len(ids)], grids),
                changes=None if changes is None else changes[index][: len(ids)],
            )
        )
    return TakenRows(taken, signals)


def with_pictures(taken: TakenRows) -> TakenRows:
    """Return rows that can be sent to another process, their images as small as they are recorded."""
    for row in taken.rows:
        if callable(row.pictures):
            row.pictures = row.pictures()
    return taken


def without_padding(ids: Sequence[int], mask: Sequence[int], pad_token_id: int) -> list[int]:
    """Return the tokens of a completion; the mask of a truncated one may be empty, then they end before the padding."""
    length = sum(mask) or max((index + 1 for index, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[:length])


def add_credit(taken: TakenRows, chosen: Rollout, before: torch.Tensor, after: torch.Tensor) -> None:
    """Add to recorded rows what the loss reads of them.

    Args:
        before: its advantages, (N,), or (N, T) of a critic, whose mean is recorded as the completion's.
        after: likewise with credit spread, (N,) or (N, T).
    """
    rows = list(chosen.recorded or ())
    if not rows:
        return
    for row, advantage, credit in zip(taken.rows, before[rows].tolist(), after[rows].tolist(), strict=True):
        if row.group in chosen.replaced:
            row.replaced = True
            continue
        length = len(row.completion)
        if isinstance(advantage, list):
            advantage = sum(advantage[:length]) / max(length, 1)
        row.advantage = advantage
        row.advantages = credit[:length] if isinstance(credit, list) else [credit] * length


# ---------------------------------------------------------------------------------------------------------------------
# Recorded rows as completions of a record: from tokens and tensors to text, numbers and thumbnails.


_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(QUANTITIES)})")


@dataclass
class RecordedRow:
    """A completion with the thumbnails of `completion.images`, in order, then of these as they were perturbed."""

    place: int
    completion: Completion
    thumbnails: list[Image.Image | None]


def rows_to_record(samples: int, num_generations: int, total: int) -> list[int]:
    """Return which of all rows of a rollout batch are recorded: the first two of each prompt, prompt by prompt.

    Two completions of a prompt can be compared; a third tells less than another prompt.

    Args:
        total: rows of all processes.
    """
    return sorted(islice(_pair_by_pair(num_generations, total), min(samples, total)))


def _pair_by_pair(num_generations: int, total: int) -> Iterator[int]:
    for pair in range(0, num_generations, 2):
        for start in range(0, total, num_generations):
            yield from range(start + pair, min(start + pair + 2, start + num_generations, total))


class OwnDecoder:
    """Decodes with a copy of a tokenizer, made when it is first used.

    A tokenizer that one thread pads with must not be used by another: its Rust part refuses both.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._own: Any = None

    def __call__(self, tokens: list[int], **options: Any) -> str:
        if self._own is None:
            self._own = copy.deepcopy(self._tokenizer)
        return str(self._own.decode(tokens, **options))


@dataclass(frozen=True)
class Completing:
    """What it takes to make completions of recorded rows.

    Attributes:
        decode: as a tokenizer's.
        vision_token_ids: placeholder tokens of images.
        options: `DAPOConfig`.
        reward_names: of the functions.
        reward_weights: of this step.
    """

    decode: Callable[..., str]
    vision_token_ids: Sequence[int]
    options: DAPOConfig
    reward_names: Sequence[str]
    reward_weights: Sequence[float]

    def rows(self, taken: TakenRows) -> list[RecordedRow]:
        """Return the rows of one process as completions."""
        lengths = [len(row.completion) for row in taken.rows]
        measured: list[dict[str, Any]] = [{} for _ in taken.rows]
        if taken.signals is not None:
            measured = measures_of_rows(taken.signals, lengths, self.options)
        return [self._row(*pair) for pair in zip(taken.rows, measured, strict=True)]

    def _row(self, row: TakenRow, measured: dict[str, Any]) -> RecordedRow:
        recorded, thumbnails, digest = row.pictures() if callable(row.pictures) else row.pictures
        exactly = partial(self.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        prompt = prompt_text(row.prompt, self.vision_token_ids, exactly)
        if row.attention is not None:
            measured["attention"] = row.attention
        if row.changes is not None and recorded:
            measured["changes"] = row.changes
        down = self.options.token_weights_positive_only and row.advantages is not None and row.advantage < 0
        if measured.get("weights") is not None and down:
            measured["weights"] = [1.0] * len(row.completion)
        completion = Completion(
            question=question_id(prompt, digest),
            group=row.group,
            prompt=prompt,
            text=self.decode(row.completion, skip_special_tokens=True),
            tokens=token_pieces(row.completion, exactly),
            solution=None if row.solution is None else str(row.solution),
            advantage=row.advantage,
            advantages=row.advantages,
            replaced=row.replaced,
            images=[replace(image) for image in recorded],
            **measured,
            **self._rewards(row.earned),
        )
        return RecordedRow(row.place, completion, [*thumbnails, *map(shrunk, row.perturbed)])

    def _rewards(self, earned: Sequence[float]) -> dict[str, Any]:
        rewards = dict(zip(self.reward_names, earned, strict=True))
        right = rewards.get(accuracy_name(self.reward_names) or "")
        weighted = (value * weight for value, weight in zip(earned, self.reward_weights, strict=True))
        return {
            "rewards": rewards,
            "reward": sum(value for value in weighted if not math.isnan(value)),
            "correct": None if right is None or math.isnan(right) else right == 1,
        }


def question_id(prompt: str, images: bytes) -> str:
    """Return what is the same for the same prompt with the same images: 16 hexadecimal digits."""
    return sha1(prompt.encode("utf-8", "replace") + b"\0" + images, usedforsecurity=False).hexdigest()[:16]


def measures_of_rows(signals: RolloutSignals, lengths: Sequence[int], options: DAPOConfig) -> list[dict[str, Any]]:
    """Return what was measured of completions, as `Completion` has it: lists of as many numbers as tokens, and metrics.

    Args:
        signals: of R rows, (R, T).
        lengths: tokens of each completion, at most T.
    """
    columns = {"logps": signals.logps, "entropies": signals.entropies, "dependency": signals.dependency}
    metrics: list[Any] = [None] * len(lengths)
    if (mass := signals.attention) is not None:
        columns["vgr"] = token_vision_gain_ratio(mass, late_layers(len(mass.vision), options.attention_segments))
        segments = measure_segments(mass, options.attention_segments, options.mdi_balance_ratio)
        metrics = reward_columns(segments)["attention_metrics"]
        if options.token_weights:
            columns["weights"] = attention_weights(mass, signals.mask, options)
    rows = {name: values.tolist() for name, values in columns.items() if values is not None}
    kept_as_nan = {"vgr", "weights"}  # the others are NaN throughout where they were not measured
    return [
        {
            name: values[index][:length]
            for name, values in rows.items()
            if name in kept_as_nan or not all(map(math.isnan, values[index]))
        }
        | ({} if metrics[index] is None else {"metrics": metrics[index]})
        for index, length in enumerate(lengths)
    ]


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
    total = (rewards * weights.to(rewards.device)).nansum(dim=1, keepdim=True)  # (N, 1)
    columns = torch.cat([rewards, total], dim=1).double().cpu().unbind(dim=1)
    statistics = {name: _mean_and_std(column) for name, column in zip([*names, "total"], columns, strict=True)}
    success = None
    if (accuracy := accuracy_name(names)) is not None:
        judged = columns[list(names).index(accuracy)]
        judged = judged[~judged.isnan()]
        success = (judged == 1).double().mean().item() if len(judged) else None
    segments: Segments = {}
    for name, value in metrics.items():
        if (found := _SEGMENT_METRIC.fullmatch(name)) is not None:
            segments.setdefault(found[1], {})[found[2]] = value
    credit: dict[str, float | None] = {
        name: value for name, value in metrics.items() if name.startswith("token_weight_") or "token_fraction" in name
    }
    return Summary(len(rewards), statistics, success, segments, credit)


def _mean_and_std(values: torch.Tensor) -> tuple[float | None, float | None]:
    values = values[~values.isnan()]
    mean = values.mean().item() if len(values) else None
    return mean, values.std().item() if len(values) > 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# What a trainer leaves of its rollouts for people to look at: records, Markdown logs, lines on the terminal.


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


def model_name(model: Any) -> str:
    """Return the name under which a model was loaded, else that of its class."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


class RolloutRecorder:
    """Records a few completions of rollouts, in a thread of the main process.

    Every process takes part in what is gathered, at the same steps.

    Raises:
        ConfigError: a file or folder cannot be written, or a log is asked for that nothing is measured for.
    """

    def __init__(self, trainer: "DAPOTrainer") -> None:
        self.trainer, self.args = trainer, trainer.args
        self.is_on = self.args.rollout_log_steps > 0
        self._last: dict[str, int | None] = {"train": None, "eval": None}
        self._merge_size = getattr(getattr(trainer.processing_class, "image_processor", None), "merge_size", None)
        self._decode = OwnDecoder(trainer._tokenizer)
        if self.is_on:
            self._refuse()
        self.sink = RecordSink(
            Path(str(self.args.output_dir)),
            self._description(),
            int(self.args.rollout_log_max_megabytes * 1e6),
            logs=markdown_logs(
                self.args, time.strftime("%Y%m%d_%H%M%S"), attention="attention" in trainer.measurement.needed
            ),
            at_once=self.args.realtime_rollout_logging,
            prints=self.args.colorize_output,
            print_length=self.args.prompt_preview_length,
        )

    def _refuse(self) -> None:
        args = self.args
        if args.attention_diag_log_path is not None and "attention" not in self.trainer.measurement.needed:
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
        mode, trainer = self.trainer.mode, self.trainer
        if not self._is_due(mode):
            return None
        self._last[mode] = trainer.state.global_step
        first, total = trainer.accelerator.process_index * rows, rows * trainer.accelerator.num_processes
        chosen = rows_to_record(self.args.rollout_log_samples, trainer.completions_per_prompt, total)
        return tuple(row - first for row in chosen if first <= row < first + rows)

    def _is_due(self, mode: str) -> bool:
        if not self.is_on:
            return False
        last, step, every = self._last[mode], self.trainer.state.global_step, self.args.rollout_log_steps
        if mode == "eval":
            return last is None  # the first batch of each evaluation
        return last is None or step // every != last // every

    def keep(self, rollout: Rollout) -> TakenRows:
        """Return the recorded rows of a judged rollout, before groups are replaced and credit is spread."""
        first = self.trainer.accelerator.process_index * len(rollout.rows)
        pad = self.trainer._tokenizer.pad_token_id
        return take_rows(rollout, first, self.trainer.completions_per_prompt, pad, self._merge_size)

    def write(self, rollout: Rollout, taken: TakenRows) -> None:
        """Gather the recorded rows of a rollout, and let the main process write them; every process calls."""
        if rollout.recorded is None:
            return
        trainer, gathered = self.trainer, [taken]
        if trainer.accelerator.num_processes > 1:
            gathered = gather_object([with_pictures(taken)])
        if not trainer.accelerator.is_main_process:
            return
        assert rollout.rewards is not None
        completing = Completing(
            self._decode,
            trainer.measurement.vision_token_ids,
            self.args,
            list(trainer.reward_func_names),
            trainer.reward_weights.tolist(),
        )
        record = Record(trainer.state.global_step, trainer.mode, time.time(), [])
        rewards = rollout.rewards.detach().clone().cpu()
        self.sink.add(partial(finished, record, gathered, completing, rewards, trainer.newest_metrics()))

    def _description(self) -> dict[str, Any]:
        return {
            "name": self.args.run_name or Path(str(self.args.output_dir)).resolve().name,
            "rewards": list(self.trainer.reward_func_names),
            "model": model_name(self.trainer.model),
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
