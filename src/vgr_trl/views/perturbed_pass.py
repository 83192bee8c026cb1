"""Perturb, replace, degrade or drop the images of rows and tool turns, and score or generate under such views."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import nn
from trl.trainer.utils import use_adapter

from vgr_trl.batch import Batch, ImagesOfRows, Prompts, Turns, build_batch, join_batches
from vgr_trl.config import REMOVE_IMAGE
from vgr_trl.data.images import IMAGE_COLUMNS, ORIGINAL_IMAGES, images_of
from vgr_trl.errors import DataError
from vgr_trl.metrics.step_metrics import Totals
from vgr_trl.passes.run_pass import run_pass, score
from vgr_trl.patches.trl import process_with_options
from vgr_trl.pixels import PERTURBED, RowImages, image_tensors
from vgr_trl.registries import DESCRIBER, TEACHER
from vgr_trl.rewards.answers import decode_with_tags
from vgr_trl.rollout import Noise, Rollout, weighted_sums
from vgr_trl.run import Run
from vgr_trl.sampling.zero_variance import filter_index
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.prefix_split import round_up_to_groups
from vgr_trl.signals.named import NOISY, RolloutSignals, add_named, build_unmeasured_signals, named_metrics
from vgr_trl.signals.perturbation import Seen, derive_seed, perturb_images, show_view
from vgr_trl.signals.ratios import visual_dependency
from vgr_trl.signals.scoring import Head, Purpose, Scores, Want, cut_rows
from vgr_trl.tools import show_again
from vgr_trl.vision import images_processed_once

Top = tuple[torch.Tensor, torch.Tensor]  # a teacher's likeliest tokens, (N, T, k), and log-probabilities, (N, T, k + 1)
Perturb = Callable[..., list[Image.Image]]  # images of a conversation, index=its number -> as many images


def perturb_prompts(prompts: Sequence[Any], numbers: Sequence[int], perturb: Perturb) -> tuple[list[Any], list[int]]:
    """Perturb the images of each distinct prompt once.

    Args:
        prompts: one prompt per row, a conversation whose image parts hold the images, or a text.
        numbers: one number per row; rows with the same perturbed images share it, over all processes, and have the
            same prompt.
        perturb: returns the perturbed images of a conversation.

    Returns:
        The distinct prompts, perturbed, and for every row the place of its prompt among them.
    """
    distinct = dict(zip(numbers, prompts, strict=True))
    perturbed = [
        replace_images(prompt, perturb(images_in(prompt), index=number)) for number, prompt in distinct.items()
    ]
    return perturbed, [*map([*distinct].index, numbers)]


def images_in(prompt: Any) -> list[Any]:
    """Return the images of a conversation, in order."""
    if isinstance(prompt, str):
        return []
    contents = [message["content"] for message in prompt if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def replace_images(prompt: Any, images: Sequence[Any]) -> Any:
    """Replace the images of a conversation, in order; without enough images, parts are removed.

    Images beyond the parts of the conversation stand behind its last image.
    """
    if isinstance(prompt, str):
        return prompt
    left, to_come, messages = iter(images), len(images_in(prompt)), []
    for message in prompt:
        if not isinstance(message["content"], str):
            parts = []
            for part in message["content"]:
                if part["type"] == "image":
                    to_come -= 1
                    parts += [{**part, "image": image} for image in islice(left, 1 if to_come else None)]
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        messages.append(message)
    return messages


def _show(prompt: Any, view: Seen | None) -> Any:
    """Return a conversation with the images of a view, and its text as the last paragraph; None: as it is."""
    prompt = prompt if view is None else replace_images(prompt, view.images)
    if view is None or not view.text:
        return prompt
    content, paragraph = prompt[-1]["content"], f"\n\n{view.text}"
    content = content + paragraph if isinstance(content, str) else [*content, {"type": "text", "text": paragraph}]
    return [*prompt[:-1], {**prompt[-1], "content": content}]


def perturb_turns(
    turns: Turns, rows: Sequence[int], numbers: Sequence[int], which: str, perturb: Perturb
) -> list[list[Image.Image]]:
    """Perturb images of some rows; return all images of each, the prompt's first.

    With `all`, a part of the first image shown by `vgr_trl.tools` becomes the same part of the perturbed image.

    Args:
        turns: images of prompts and tools.
        rows: numbers of the rows.
        numbers: one number per row, from which perturbations are drawn; completions of a prompt share it.
        which: perturb `all` images, or only those of the `prompt` or of `tools`.
        perturb: returns perturbed images, given their number and the place of the first image in the row.
    """
    shown = []
    for row, number in zip(rows, numbers, strict=True):
        of_row = turns.images[row]
        images, count = [*of_row], len(of_row) - len(turns.returned[row])
        if which != "tools":
            images[:count] = perturb(images[:count], index=number)
        if which != "prompt":
            images[count:] = perturb(images[count:], index=number, first=count)
        if which == "all" and count:
            parts = [show_again(part, images[0]) for part in of_row[count:]]
            images[count:] = [part or other for part, other in zip(parts, images[count:], strict=True)]
        shown.append(images)
    return shown


def rows_perturbed(turns: Turns, which: str) -> torch.Tensor:
    """Return the rows with an image that `perturb_turns` perturbs, (N,) bool."""
    returned = torch.tensor([*map(len, turns.returned)])
    every = torch.tensor([*map(len, turns.images)])
    return {"all": every, "tools": returned, "prompt": every - returned}[which] > 0


def process_images(processor: Any, images: ImagesOfRows) -> dict[str, torch.Tensor]:
    """Return the pixel inputs of the images of all rows, as TRL makes them for images of tools."""
    flat = [image for of_row in images for image in of_row]
    with process_with_options(processor):
        return image_tensors(processor.image_processor(images=flat, return_tensors="pt"))


def score_perturbed(run: Run, rollout: Rollout) -> None:
    """Score the completions given other images, and add the dependency and the views to the rollout's signals.

    Only the pixels of one pass are kept in memory. If the perception loss is on, the batch gets the perturbed pixels of
    all rows as `perturbed_pixel_values`.
    """
    batch, measurement = rollout.batch, run.measurement
    if "perception" in measurement.needed:
        perturbed = _batch_under(run.args.perturbation, run, rollout, range(len(batch)))
        pixels = perturbed.images.tensors.get("pixel_values")
        if pixels is not None:
            rollout.batch = batch = replace(batch, images=batch.images.with_pixels(pixels, PERTURBED))
    if not (measurement.perturbations or measurement.row_views):
        return
    rollout.signals = signals = rollout.signals or build_unmeasured_signals(batch.valid)
    chunks = cut_rows(len(batch), round_up_to_groups(run.rows_per_chunk, run.completions_per_prompt))
    if measurement.perturbations:
        _score_perturbations(run, rollout, chunks)
    totals, tops = Totals(), dict[str, Top | None]()
    for name in measurement.row_views:
        signals.views[name], tops[name] = _score_row_view(run, rollout, name, chunks)
        known = signals.mask.bool() & ~signals.views[name].isnan()
        totals.add_mean(f"views/{name}/rows", known.any(1), signals.mask.any(1))
    if TEACHER in tops:
        _keep_teacher(run, rollout, tops)
    gather = run.accelerator.gather
    rollout.metrics |= named_metrics(add_named(measurement.named, signals), signals, gather) | totals.metrics(gather)


def _keep_teacher(run: Run, rollout: Rollout, tops: Mapping[str, Top | None]) -> None:
    """Take the describer's scores within descriptions; add the teacher's columns that loss terms read to the batch."""
    views, top = cast("RolloutSignals", rollout.signals).views, tops[TEACHER]
    if DESCRIBER in tops:
        lengths = [_description_length(run, ids) for ids in rollout.batch.completion_ids.tolist()]
        within = torch.arange(rollout.batch.length) < torch.tensor(lengths).unsqueeze(1)  # (N, T)
        within = within.to(views[TEACHER].device)
        views[TEACHER] = torch.where(within, views.pop(DESCRIBER), views[TEACHER])
        if top is not None:
            both = zip(cast("Top", tops[DESCRIBER]), top, strict=True)
            ids, logps = (torch.where(within.unsqueeze(-1), *of_teachers) for of_teachers in both)
            top = ids, logps
    rollout.teacher_top = top
    if run.measurement.term_needs & {"teacher", "teacher_top"}:
        columns = {"teacher_logps": views[TEACHER]}
        if top is not None and run.measurement.needs("teacher_top"):
            ids, logps = (values.transpose(1, 2).contiguous() for values in top)  # the tokens last
            columns |= {"teacher_top_ids": ids, "teacher_top_logps": logps}
        rollout.batch = rollout.batch.with_columns(**columns)


def _description_length(run: Run, ids: list[int]) -> int:
    """Return the number of tokens of a completion up to the end of its description; 0 without its closing tag."""
    tag = run.args.blind_tag

    def has_ended(length: int) -> bool:
        return f"</{tag}>" in decode_with_tags(run.tokenizer, [ids[:length]], f"<{tag}></{tag}>")[0]

    return bisect_left(range(len(ids)), True, key=has_ended) if has_ended(len(ids)) else 0


def _score_perturbations(run: Run, rollout: Rollout, chunks: Sequence[range]) -> None:
    """Score a rollout under all perturbations in chunks of rows; set its dependency, shift and views."""
    args, measurement, parts = run.args, run.measurement, list[Scores]()
    signals, want = cast("RolloutSignals", rollout.signals), Want(hidden=measurement.needs("shift"))
    names = measurement.perturbations
    for rows in chunks:
        batches = [_batch_under(name, run, rollout, rows) for name in names]
        batch = join_batches(batches, pad_token_id=run.tokenizer.pad_token_id)
        parts.append(score(run, batch, want, purpose=Purpose.VIEW))
    logps = torch.cat([part.logps.unflatten(0, (len(names), -1)) for part in parts], 1)  # (perturbations, N, T)
    if args.perturbation in names:
        rollout.changes = logps[names.index(args.perturbation)] - signals.logps
    turns = rollout.turns
    is_perturbed = rollout.batch.has_images if turns is None else rows_perturbed(turns, args.perturb_images)
    unchanged = ~is_perturbed.to(logps.device).unsqueeze(1)  # (N, 1)
    by_name = dict(zip(names, logps.masked_fill(unchanged, torch.nan), strict=True))
    if "views" in measurement.needed:
        signals.views |= {name: value.float() for name, value in by_name.items()}
    if "dependency" in measurement.needed:
        perturbed = torch.stack([by_name[name] for name in args.perturbations])
        of_each = visual_dependency(signals.logps.expand_as(perturbed), perturbed)
        signals.dependency = of_each.mean(0) if args.dependency_over == "mean" else of_each.amin(0)
    if measurement.needs("shift") and rollout.scores is not None and rollout.scores.hidden is not None:
        first = [part.hidden[: len(part.hidden) // len(names)] for part in parts if part.hidden is not None]
        head = Head(causal_model(run.model))
        with torch.no_grad():
            shift = head.shift(rollout.scores.hidden, torch.cat(first), signals.mask.bool(), args.temperature)
        signals.jsd, signals.perturbed_entropies = (values.masked_fill(unchanged, torch.nan) for values in shift)


def _score_row_view(run: Run, rollout: Rollout, name: str, chunks: Sequence[range]) -> tuple[torch.Tensor, Top | None]:
    """Return the log-probabilities of the completions under a view of their rows, (N, T); NaN for rows without it.

    And a teacher's most likely tokens, if anything reads them. Rows without the view are not computed.

    Args:
        run: scores the completions.
        rollout: a scored rollout; it keeps the images of the view `teacher`.
        name: name of the view among the signals.
        chunks: rows of each pass.
    """
    measurement, args, teaches = run.measurement, run.args, name in (TEACHER, DESCRIBER)
    reads_all, count = measurement.needs("teacher_top"), measurement.teacher_top
    reads = teaches and (reads_all or (count > 0 and bool(rollout.recorded)))
    logps = torch.full(rollout.batch.completion_ids.shape, torch.nan, device=rollout.batch.completion_ids.device)
    top: Top | None = None
    for rows in chunks:
        shown = _rows_under(measurement.row_views[name], run, rollout, rows)
        if teaches and args.distil_failed_only:
            failed = rollout.rewards[:, filter_index(args.distil_failed_only, [*run.facts.rewards])] <= 0
            shown = {row: view for row, view in shown.items() if failed[rollout.first + row]}
        # With sharded weights every process makes as many passes, also where a budget of tokens cuts them.
        kept = [*rows] if run.facts.is_sharded else [*shown] or [rows.start]
        batch = _batch_behind([_show(rollout.messages[row], shown.get(row)) for row in kept], run, rollout, kept)
        with _weights_of(name, run) as model, torch.no_grad():
            scores = score(run, batch, Want(hidden=reads), model, purpose=Purpose.VIEW)
            if scores.hidden is not None:
                read = [row in shown and (reads_all or row in (rollout.recorded or ())) for row in kept]
                mask = scores.mask & torch.tensor(read, device=scores.mask.device).unsqueeze(1)
                head = Head(causal_model(model))
                likely = head.most_likely(scores.hidden, mask, count, args.temperature)
                top = top or cast("Top", tuple(part.new_zeros(len(logps), *part.shape[1:]) for part in likely))
                for whole, part in zip(top, likely, strict=True):
                    whole[kept] = part
        if shown:
            logps[[*shown]] = scores.logps.float()[[kept.index(row) for row in shown]]
        if name == TEACHER:
            rollout.teacher_images |= {row: [*view.images] for row, view in shown.items()}
    return logps, top


@contextmanager
def _weights_of(name: str, run: Run) -> Iterator[nn.Module]:
    """Yield the model that scores a view: the policy, or its reference for a teacher with those weights."""
    if name not in (TEACHER, DESCRIBER) or run.args.teacher_weights == "policy":
        yield run.model
    elif run.reference is not None:
        yield run.reference
    else:
        policy: Any = run.accelerator.unwrap_model(run.model)
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):  # as TRL scores it
            yield run.model


def _rows_under(name: str, run: Run, rollout: Rollout, rows: range) -> dict[int, Seen]:
    """Show rows under a view, the same for the completions of a prompt; rows without the view are left out."""
    parameters = run.args.parameters_of(name)
    views: dict[int, Seen | None] = {}  # by number of the prompt
    numbers = {row: (rollout.first + row) // run.completions_per_prompt for row in rows}
    for row, number in numbers.items():
        if number not in views:
            images, seed = images_in(rollout.messages[row]), derive_seed(run.args.seed, run.step, number)
            views[number] = show_view(images, rollout.rows[row], name, parameters, seed=seed)
    return {row: view for row, number in numbers.items() if (view := views[number]) is not None}


def _batch_behind(conversations: list[Any], run: Run, rollout: Rollout, rows: Sequence[int]) -> Batch:
    """Build a batch of the completions of some rows of a rollout behind other prompts, of any size."""
    part = [*rows]
    with images_processed_once(run.processor):
        prompts = run.tokenize(conversations)
    batch = build_batch(
        prompts,
        rollout.batch.completion_ids[part].tolist(),
        pad_token_id=run.tokenizer.pad_token_id,
        vision_token_ids=run.measurement.vision_token_ids,
        pad_to_multiple_of=run.pad_to_multiple_of,
    )
    for name in rollout.batch.token_types:  # which processors leave out beside texts
        batch.columns.setdefault(name, torch.zeros_like(batch.ids))
    return replace(batch, completion_mask=rollout.batch.completion_mask[part].to(batch.completion_mask))


def _batch_under(name: str, run: Run, rollout: Rollout, rows: range) -> Batch:
    """Return the tokens and images of some rows of a rollout under the perturbation `name`."""
    args = run.args
    if name == REMOVE_IMAGE:
        texts = [replace_images(prompt, ()) for prompt in rollout.messages[rows.start : rows.stop]]
        return _batch_behind(texts, run, rollout, rows).map(run.to_device)
    perturb = partial(perturb_images, name=name, parameters=args.parameters_of(name), seed=args.seed, step=run.step)
    shared_by = run.completions_per_prompt if args.perturb_per == "prompt" else 1
    batch, images = batch_with_other_images(run, rollout, rows, perturb, shared_by, args.perturb_images)
    if name == args.perturbation:
        rollout.perturbed_images |= zip(rows, images, strict=True)
    return batch


def batch_with_other_images(
    run: Run, rollout: Rollout, rows: range, perturb: Perturb, shared_by: int, which: str = "all"
) -> tuple[Batch, list[list[Any]]]:
    """Return the tokens of some rows of a rollout with perturbed images, and these images of each row.

    Args:
        run: processor of the model.
        rollout: a generated rollout.
        rows: numbers of the rows.
        perturb: as `perturb_prompts` and `perturb_turns` take it.
        shared_by: number of consecutive completions that share the perturbed images of a prompt.
        which: images to perturb, as `perturb_turns` takes it.

    Raises:
        DataError: the perturbed images have other pixel shapes than the images.
    """
    batch = rollout.batch.take(rows).to_score
    numbers = [(rollout.first + row) // shared_by for row in rows]
    fields: Mapping[str, Any] = {}
    if rollout.turns is None:
        conversations, places = perturb_prompts(rollout.messages[rows.start : rows.stop], numbers, perturb)
        prompts = run.tokenize(conversations)
        fields, distinct = prompts.fields, prompts.images or []
        images: list[list[Any]] = [images_in(conversations[place]) for place in places]
    else:
        images = distinct = perturb_turns(rollout.turns, rows, numbers, which, perturb)
        fields, places = process_images(run.processor, images) if any(images) else {}, [*range(len(rows))]
    if not any(images):
        return batch, images
    return replace(batch, images=_perturbed_images(batch.images, fields, distinct, places)), images


def _perturbed_images(
    images: RowImages, fields: Mapping[str, Any], distinct: ImagesOfRows, places: Sequence[int]
) -> RowImages:
    """Return the images of N rows with perturbed pixels.

    Args:
        images: unperturbed.
        fields: outputs of the processor for the distinct perturbed prompts, in order.
        distinct: images of each distinct prompt.
        places: number of each row's prompt among the distinct prompts.

    Raises:
        DataError: the processor gives perturbed images other shapes than the images.
    """
    tiles = images.num_tiles and [images.num_tiles[places.index(place)] for place in range(len(distinct))]
    like = images.tensors["pixel_values"]
    moved = {  # before they are repeated
        name: value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
        for name, value in image_tensors(fields).items()
    }
    shown = RowImages(moved, [len(of_prompt or ()) for of_prompt in distinct], tiles)
    return images.with_pixels_of(shown.take(places))


def score_perturbed_part(run: Run, model: nn.Module, batch: Batch, tokens: torch.Tensor) -> Scores:
    """Score a part of a micro-batch with perturbed images, with gradients.

    Args:
        run: gives processes and plans.
        model: the policy, also wrapped.
        batch: a part of a micro-batch, with perturbed images if it has images.
        tokens: (N, T) bool, tokens with loss.
    """
    if PERTURBED in batch.images.tensors:
        batch = replace(batch, images=batch.images.with_pixels(batch.images.tensors[PERTURBED]))
    want = Want(entropies=True, tokens=tokens)
    return run_pass(run, model, batch, want, purpose=Purpose.VIEW, gradients=True)


def perturb_noisy_prompts(run: Run, rollout: Rollout, prompts: Prompts) -> Prompts:
    """Perturb the images of some prompts of a rollout; return the prompts to sample from.

    The last completions of each prompt see the same perturbed images, on any process. The rollout keeps the prompts.

    Args:
        run: options, step and processor.
        rollout: its `noise` is set.
        prompts: prompts of the first turn.

    Raises:
        DataError: a perturbed image has other tokens than the image.
    """
    args, step = run.args, run.step + 1  # counted from 1; perturbations that score this rollout draw by `run.step`
    if not args.noisy_generations or not run.trains or rollout.greedy or rollout.blind:
        return prompts
    left = args.noise_left(step, max(run.get_state().max_steps, step))
    count = args.noisy_generations if args.noisy_decay_of == "strength" else round(args.noisy_generations * left)
    strength = 1.0 if args.noisy_decay_of == "generations" else left
    size, every = run.completions_per_prompt, range(rollout.first, rollout.first + len(rollout.rows))
    noisy = noisy_rows(every, size, count)
    rollout.noise = Noise(noisy, count, strength)
    if not any(noisy) or prompts.images is None:  # another process may have noisy rows with images
        return prompts
    parameters = args.weakened_parameters(args.noisy_perturbation, strength)
    perturb = partial(perturb_images, name=args.noisy_perturbation, parameters=parameters, seed=args.seed, step=step)
    perturbed, places = perturb_prompts(rollout.messages, [number // size for number in every], perturb)
    conversations = zip(noisy, places, rollout.messages, strict=True)
    sampled_from = run.tokenize([perturbed[place] if is_noisy else clean for is_noisy, place, clean in conversations])
    if [list(ids) for ids in sampled_from.ids] != [list(ids) for ids in prompts.ids]:
        raise DataError(f"{args.noisy_perturbation} changes image tokens: set noisy_generations to 0.")
    rollout.noise.prompts = sampled_from
    return sampled_from


def noisy_rows(numbers: Sequence[int], generations: int, count: int) -> list[bool]:
    """Return which rows are noisy: the last `count` completions of each prompt.

    Args:
        numbers: numbers of the rows over all processes.
        generations: completions per prompt.
        count: noisy completions per prompt.
    """
    return [number % generations >= generations - count for number in numbers]


def record_noise(run: Run, rollout: Rollout, reward_weights: torch.Tensor) -> None:
    """Set old log-probabilities and metrics of a noisy rollout, and the view that a teacher `clean` compares with."""
    noise, args = rollout.noise, run.args
    if noise is None:
        return
    if noise.generations and (args.noisy_importance == "perturbed" or args.teacher_view == "clean"):
        batch, prompts = rollout.batch, noise.prompts
        if prompts is not None and prompts.images is not None:
            images = _perturbed_images(batch.images, prompts.fields, prompts.images, range(len(batch)))
            batch = replace(batch, images=images)
        scores = score(run, batch, Want(), purpose=Purpose.VIEW)
        if args.noisy_importance == "perturbed":
            rollout.batch = replace(rollout.batch, old_logps=scores.logps)
        if args.teacher_view == "clean" and rollout.signals is not None:
            rollout.signals.views[NOISY] = scores.logps.float()
    rollout.metrics |= {"noisy/generations": float(noise.generations), "noisy/strength": noise.strength}
    if noise.generations:
        rewards = weighted_sums(rollout.rewards, reward_weights).nan_to_num()  # (N of all,)
        rows = noisy_rows(range(len(rewards)), run.completions_per_prompt, noise.generations)
        noisy = torch.tensor(rows, device=rewards.device)
        rollout.metrics["noisy/reward"] = rewards[noisy].mean().item()
        rollout.metrics["noisy/reward_clean"] = rewards[~noisy].mean().item()


_STREAM = 10**6  # random numbers apart from those of other perturbations, which count images from 0


def degrade_rows(run: Run, rollout: Rollout) -> list[dict[str, Any]]:
    """Return the rows of a training rollout with degraded images, and `original_images`, which the view shows.

    All completions of a prompt get the same images, on any process.

    Args:
        run: options and step.
        rollout: not generated yet; it gets a metric.
    """
    args, size, step = run.args, run.completions_per_prompt, run.step + 1  # counted from 1, as for noise
    if not args.degraded_by or not run.trains:
        return rollout.rows
    strength = args.degraded_strength(step, max(run.get_state().max_steps, step))
    parameters = args.weakened_parameters(args.degraded_by, strength)
    rollout.metrics["degraded/strength"] = strength
    shown: dict[int, list[Any]] = {}  # number of the prompt -> its images
    rows = []
    for number, row in ((number // size, row) for number, row in enumerate(rollout.rows, rollout.first)):
        originals = images_of(row)
        if number not in shown:
            place: Any = {"seed": args.seed, "step": step, "index": number}
            drawn = np.random.default_rng(derive_seed(**place, image=_STREAM)).random()
            change = partial(perturb_images, name=args.degraded_by, parameters=parameters, first=_STREAM + 1, **place)
            shown[number] = originals if drawn < args.degraded_untouched else change(images=originals)
        images, present = shown[number], [name for name in IMAGE_COLUMNS if row.get(name)]
        columns = {name: images if isinstance(row[name], list) else images[0] for name in present}
        rows.append(row | columns | {ORIGINAL_IMAGES: originals})
    return rows
