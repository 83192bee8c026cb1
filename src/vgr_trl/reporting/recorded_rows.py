"""Turn rows of a rollout into completions of a record: tokens, images, attention maps, turns and measurements.

`RecordBeforeTraining` records answers before the first step.
"""

import copy
import io
import random
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha1
from itertools import chain, cycle, groupby, islice, repeat
from math import isqrt, prod
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from vgr_trl.credit import OF_REWARD, attention_weights
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import boxes_of, images_of, open_image
from vgr_trl.data.prompts import to_parts
from vgr_trl.errors import DataError
from vgr_trl.patches.trl import unlogged
from vgr_trl.patching import keep_random_state, patched_attribute
from vgr_trl.reporting.markdown import Summary
from vgr_trl.reporting.records import AttentionMap, Completion, RecordedImage, Turn
from vgr_trl.rows import Turns
from vgr_trl.signals.named import ATTENTION_QUANTITIES, RolloutSignals, reward_columns
from vgr_trl.signals.ratios import late_layers, measure_segments, token_vision_gain_ratio
from vgr_trl.views.regions import boxes_in_pixels

THUMBNAIL_SIDE = 256  # maximum, in pixels
WEBP_QUALITY = 80  # of 100: about 5 kB for a photograph of that size
_SEGMENT_METRIC = re.compile(rf"attention/(\w+)/({'|'.join(ATTENTION_QUANTITIES)})")
Grid = tuple[int, int]
Decode = Callable[[list[int]], Any]  # a tokenizer's, with special tokens and without clean-up


@dataclass
class RecordedRow:
    """A recorded row: its index among the rows of all processes, its completion, and thumbnails by name."""

    place: int
    completion: Completion
    thumbnails: dict[str, bytes]


def describe_turns(turns: Turns, row: int, length: int) -> list[Turn]:
    """Return the turns of a completion, with the calls at their ends and the answers of tools.

    Args:
        turns: of the batch.
        row: index in the batch.
        length: tokens of the completion.
    """
    runs = (list(run) for is_own, run in groupby(enumerate(turns.own[row][:length]), itemgetter(1)) if is_own)
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
    given = (f"{name}={value!r}" for name, value in arguments.items()) if isinstance(arguments, dict) else [arguments]
    return f"{function.get('name', 'unknown')}({', '.join(map(str, given))})"


def read_row_images(
    row: Mapping[str, Any], grids: Sequence[Grid | None], returned: Sequence[Image.Image] = ()
) -> tuple[list[RecordedImage], dict[str, bytes]]:
    """Return the images of a row and of its tools, and thumbnails by name; an unreadable image has size 0.

    Args:
        row: of the data.
        grids: rows and columns of the vision tokens of each image; images beyond them have no grid.
        returned: images that tools returned.
    """
    recorded: list[RecordedImage] = []
    thumbnails: dict[str, bytes] = {}
    for value, grid in zip([*images_of(row), *returned], chain(grids, repeat(None)), strict=False):
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
    """Return an image as it is recorded; add a thumbnail of at most 256 pixels per side, on white if transparent.

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


def find_image_grids(batch: Mapping[str, Any], row: int, processor: Any, num_vision: int | None) -> list[Grid | None]:
    """Return rows and columns of the vision tokens of each image of a row; None if unknown.

    Supported: grids from processors of the Qwen family, and square grids of equal images without tiles.

    Args:
        batch: batch of TRL with `num_images`, and optionally `image_grid_thw` (images, 3).
        row: index in the batch.
        processor: of the model; its image processor says how many patches per side `image_grid_thw` merges to a token.
        num_vision: vision tokens of the row's prompt; None if unknown.
    """
    counts: Sequence[int] = batch.get("num_images") or [0] * (row + 1)
    count, first = counts[row], sum(counts[:row])
    grids = batch.get("image_grid_thw")
    if grids is not None and (size := getattr(processor.image_processor, "merge_size", None)) is not None:
        return [(h // size, w // size) if t == 1 else None for t, h, w in grids[first : first + count].tolist()]
    tiled = any(batch.get(name) is not None for name in ("num_tiles", "image_sizes", "spatial_shapes"))
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
    """Return the text of each token; the first of a run of vision tokens is `<image>`, the others are empty.

    Args:
        tokens: text of the T tokens.
        ids: of the T tokens.
        vision_token_ids: of the model.
    """
    vision = [token in vision_token_ids for token in ids]
    runs = zip(tokens, vision, [False, *vision], strict=False)
    return [text if not is_vision else "" if follows else "<image>" for text, is_vision, follows in runs]


def prompt_text(ids: Sequence[int], vision_token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of a prompt, with `<image>` for each run of vision tokens.

    Args:
        ids: of the prompt, without padding.
        vision_token_ids: of the model.
        decode: returns the text of tokens.
    """
    runs = groupby(ids, key=set(vision_token_ids).__contains__)
    return "".join("<image>" if is_vision else decode(list(run)) for is_vision, run in runs)


def completion_measurements(signals: RolloutSignals, length: int, options: Any) -> dict[str, Any]:
    """Return the measurements of a completion of `length` tokens, by attribute of `Completion`.

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

    def known(values: Mapping[str, Tensor | None]) -> dict[str, Any]:
        rows = {name: value[0, :length] for name, value in values.items() if value is not None}
        return {name: row.tolist() for name, row in rows.items() if not row.isnan().all()}  # all NaN if not measured

    own = {name: value for name, value in signals.extra.items() if name != OF_REWARD and name not in columns}
    return found | known(columns) | {"signals": known(own)}


def find_accuracy(values: Mapping[str, Any]) -> Any:
    """Return the value of the accuracy reward, given values by the name of the reward; None without that reward."""
    return next((value for name, value in values.items() if name.startswith("accuracy")), None)


def summarise_rollout(rewards: Tensor, names: Sequence[str], weights: Tensor, metrics: Mapping[str, float]) -> Summary:
    """Summarise a rollout batch in numbers.

    Args:
        rewards: (N of all processes, number of functions), NaN if a reward does not apply.
        weights: (number of functions,).
        metrics: of the batch, by logged name.
    """
    columns = {**dict(zip(names, rewards.double().T, strict=True)), "total": (rewards * weights).double().nansum(dim=1)}
    summary = Summary(len(rewards), {name: (v.nanmean().item(), nanstd(v).item()) for name, v in columns.items()})
    if (accuracy := find_accuracy(columns)) is not None:
        summary.success_rate = (accuracy[~accuracy.isnan()] == 1).double().mean().item()
    for name, value in metrics.items():
        if found := _SEGMENT_METRIC.fullmatch(name):
            summary.segments.setdefault(found[1], {})[found[2]] = value
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
        rows = [data[row] for row in islice(cycle(trainer._get_eval_sampler(data)), first, first + size)]
        logs = patched_attribute(trainer, "_logs", copy.deepcopy(trainer._logs))
        python, numpy = random.getstate(), np.random.get_state()
        trainer.model_wrapped.eval()
        try:
            with keep_random_state(trainer.accelerator.device), torch.no_grad(), unlogged(trainer), logs:
                trainer._prepare_inputs(rows)
                self.scores = {f"eval_{name}": fmean(each) for name, each in trainer._metrics["eval"].items()}
        finally:
            trainer.model_wrapped.train()
            random.setstate(python)
            np.random.set_state(numpy)


def needs_record_before_training(args: DAPOConfig, data: Any) -> bool:
    """Whether a run records rollouts, evaluates one data set of known length, and not already at step 0."""
    wanted = args.rollout_log_steps > 0 and not args.eval_on_start and args.eval_strategy != "no"
    return wanted and isinstance(data, Sized) and not isinstance(data, dict) and len(data) > 0
