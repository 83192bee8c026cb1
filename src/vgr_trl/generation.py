"""Wrap generation: noisy views, blind answers, turns of completions that call tools."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from vgr_trl.data.prompts import format_question, special_tokens, texts_of
from vgr_trl.passes.run_pass import Purpose
from vgr_trl.patches.trl import override_sampling, process_with_options, readable_calls
from vgr_trl.patches.vllm import answers_of_server
from vgr_trl.pixels import image_tensors, joined
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.rollout import ConstructedTrainer, Noise, Rollout, describe_row, weighted_sums
from vgr_trl.rows import (
    OLD_LOGPS,
    ImagesOfRows,
    Prompts,
    Turns,
    pixels_of_rows,
    scoring_inputs,
)
from vgr_trl.sharing.model_support import replaced
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.perturbation import Perturb, perturb_images, perturbed_prompts
from vgr_trl.signals.probe import GenerationProbe
from vgr_trl.signals.scoring import Want
from vgr_trl.tools import ToolGuard, show_again
from vgr_trl.utils import DataError


def generate(
    trainer: ConstructedTrainer,
    rollout: Rollout | None,
    prompts: Prompts,
    num_generations: int,
    plain: Callable[[Any, Any, Any, int], Any],
) -> Any:
    """Return what TRL's `_generate_single_turn` does; the rollout keeps the prompts of its first turn.

    Args:
        num_generations: completions of each prompt, which are adjacent and alike to a server of vLLM.
        plain: TRL's method.

    Raises:
        VLLMServerError: the server of vLLM does not answer.
    """
    model, measurement = trainer.model, trainer.measurement
    first_turn = rollout is not None and not hasattr(rollout, "prompts")
    if rollout is not None and first_turn:
        if trainer.pixels_unchecked and not rollout.blind:
            refuse_dropped_images(prompts, measurement.vision_token_ids)
        scores_all = measurement.scoring and not (measurement.samples and model.training)
        if scores_all and not trainer.use_vllm:  # scoring reads the pixels of generation where they are
            pixels = image_tensors(prompts.fields).get("pixel_values")
            fields = {} if pixels is None else {"pixel_values": trainer._prepare_input(pixels)}
            prompts = replace(prompts, fields={**prompts.fields, **fields})
        rollout.prompts = prompts
        prompts = perturb_noisy_prompts(trainer, rollout)
        if rollout.noise is not None or rollout.blind:  # what is asked differs within a group
            num_generations = 1
    ids, images = prompts.ids, prompts.images
    if trainer.vllm_images is not None:
        ids, images = trainer.vllm_images.prepared(ids, images, prompts.fields)
    with (
        trainer.clock.stage("generation", model.training),
        trainer.passes.around(model, counts=model.training),
        override_sampling(trainer, eval_sampling(trainer)),
        answers_of_server(trainer) if trainer.use_vllm and trainer.args.vllm_mode == "server" else nullcontext(),
    ):
        measures = "attention" in measurement.needed and trainer.args.attention_source == "generate"
        if rollout is None or rollout.blind or not (first_turn and measures):
            return plain(ids, images, prompts.fields, num_generations)
        tokens = {"vision_token_ids": measurement.vision_token_ids, "special_token_ids": measurement.special_token_ids}
        with GenerationProbe(model, **tokens, temperature=trainer.temperature) as probe:
            generated = plain(ids, images, prompts.fields, num_generations)
        rollout.generated = RolloutSignals(probe.logps, probe.entropies, probe.mass.mask, probe.mass)
        return generated


def eval_sampling(trainer: ConstructedTrainer) -> dict[str, float]:
    """Return the sampling options of the current mode that differ from those of training: none in training."""
    given = {"temperature": trainer.args.eval_temperature, "top_p": trainer.args.eval_top_p}
    return {name: value for name, value in given.items() if value is not None and not trainer.model.training}


def blind_answers(
    trainer: ConstructedTrainer, rollout: Rollout, completion_ids: list[list[int]]
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return one more answer per completion as a column for rewards, None without a description, and metrics.

    All of a process are generated at once, one for each completion, as its own completions are; they are not trained
    on, and not counted among the tokens of the run.
    """
    args, accelerator = trainer.args, trainer.accelerator
    texts = trainer._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    described = [extract_description(text, args.blind_tag, args.blind_without_tag == "completion") for text in texts]
    conversations = [
        blind_conversation(args.blind_prompt, question_of(row), found or "")
        for row, found in zip(rollout.rows, described, strict=True)
    ]
    given = trainer.answer(rollout.rows, conversations)
    answers = [None if found is None else answer for found, answer in zip(described, given, strict=True)]
    share = torch.tensor([answer is not None for answer in answers], device=accelerator.device)
    described_share = accelerator.gather(share).float().mean().item()
    return {BLIND_ANSWERS: answers}, {"blind/described": described_share}


def extract_description(text: str, tag: str, or_all: bool) -> str | None:
    """Return what stands between the first tags of that name, stripped; None, or all of the text, without any."""
    _, opened, rest = text.partition(f"<{tag}>")
    description, closed, _ = rest.partition(f"</{tag}>")
    if opened and closed:
        return description.strip()
    return text if or_all else None


def question_of(row: Mapping[str, Any]) -> str:
    """Return what a row asks, with its options, without marks of images.

    That is its column `problem` if it has one, else the text of the last message of its prompt.
    """
    problem = row.get("problem")
    if isinstance(problem, str):
        text = format_question(problem, row.get("choices"))
    else:
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else "\n".join(texts_of(prompt[-1:]))
    return text.replace("<image>", "").strip()


def blind_conversation(template: str, question: str, description: str) -> list[dict[str, str]]:
    """Return the conversation that asks a question about a description."""
    parts = re.split(r"(\{description\}|\{question\})", template)
    known = {"{description}": description, "{question}": question}
    return [{"role": "user", "content": "".join(known.get(part, part) for part in parts)}]


def perturb_noisy_prompts(trainer: ConstructedTrainer, rollout: Rollout) -> Prompts:
    """Return the prompts of a rollout as they are to be generated from; the rollout keeps them.

    The last completions of each prompt get one perturbed image, whichever process they are on.

    Raises:
        DataError: a perturbed image makes other tokens than the image itself.
    """
    args, prompts, state = trainer.args, rollout.prompts, trainer.state
    if not args.noisy_generations or not trainer.model.training or rollout.greedy or rollout.blind:
        return prompts
    step = state.global_step + 1
    left = args.noise_left(step, max(state.max_steps, step))
    count = args.noisy_generations if args.noisy_decay_of == "strength" else round(args.noisy_generations * left)
    strength = 1.0 if args.noisy_decay_of == "generations" else left
    size, first = trainer.completions_per_prompt, trainer.accelerator.process_index * len(rollout.rows)
    noisy = noisy_rows(len(rollout.rows), size, count, first)
    rollout.noise = Noise(noisy, count, strength)
    trainer._log_completion_extra("noisy", noisy)
    if not any(noisy) or prompts.images is None:  # another process may have images
        return prompts
    parameters = args.noisy_parameters(strength)
    perturb = partial(perturb_images, name=args.noisy_perturbation, parameters=parameters, seed=args.seed, step=step)
    numbers = [(first + row) // size for row in range(len(rollout.rows))]
    perturbed, own = perturbed_prompts(rollout.messages, numbers, perturb)
    seen = [
        perturbed[own[row]] if is_noisy else conversation
        for row, (conversation, is_noisy) in enumerate(zip(rollout.messages, noisy, strict=True))
    ]
    shown = trainer.tokenize(seen)
    if [list(ids) for ids in shown.ids] != [list(ids) for ids in prompts.ids]:
        found = f"Images perturbed by {args.noisy_perturbation} give other image tokens than the originals"
        raise DataError(f"{found}: set noisy_generations to 0 for this processor.")
    rollout.noise.prompts = shown
    return shown


def noisy_rows(rows: int, generations: int, count: int, first: int) -> list[bool]:
    """Return which rows of a process are noisy: the last `count` completions of each prompt.

    Args:
        first: number of the first row among those of all processes.
    """
    return [(first + row) % generations >= generations - count for row in range(rows)]


def record_noise(trainer: ConstructedTrainer, rollout: Rollout) -> None:
    """Give a rollout the old log-probabilities that `noisy_importance` says, and metrics of the noise."""
    noise, args = rollout.noise, trainer.args
    if noise is None:
        return
    if noise.generations and args.noisy_importance == "perturbed":
        batch, seen = rollout.batch, noise.prompts
        if seen is not None and seen.images is not None:
            pixels = pixels_of_rows(seen.fields, seen.images, range(len(rollout.rows)), batch)
            batch = batch | {"pixel_values": joined(pixels)}
        scores = trainer.score(scoring_inputs(batch), Want(), purpose=Purpose.VIEW)
        rollout.batch = rollout.batch | {OLD_LOGPS: scores.logps}
    rollout.metrics |= {"noisy/generations": float(noise.generations), "noisy/strength": noise.strength}
    if noise.generations:
        rewards = weighted_sums(rollout.rewards, trainer.reward_weights).nan_to_num()  # (N of all,)
        rows = noisy_rows(len(rewards), trainer.completions_per_prompt, noise.generations, 0)
        noisy = torch.tensor(rows, device=rewards.device)
        rollout.metrics["noisy/reward"] = rewards[noisy].mean().item()
        rollout.metrics["noisy/reward_clean"] = rewards[~noisy].mean().item()


def refuse_dropped_images(prompts: Prompts, vision_token_ids: Sequence[int]) -> None:
    """Raise `DataError` if a prompt with images has no placeholder token, because its chat template drops images."""
    for ids, images in zip(prompts.ids, prompts.images or (), strict=False):
        if images and vision_token_ids and not set(vision_token_ids).intersection(ids):
            found = f"A prompt of {len(ids)} tokens has {len(images)} images, but no image token"
            cure = "use a chat template that writes images, or set check_pixels to False to train anyway"
            raise DataError(f"{found}: {cure}.")


@contextmanager
def guarded(trainer: ConstructedTrainer) -> Iterator[None]:
    """Keep the run alive in this block whatever the policy writes to tools and whatever they return."""
    processor: Any = trainer.processing_class
    guard = ToolGuard(special_tokens(processor), processor.image_processor if trainer._is_vlm else None)
    changes = [
        (trainer, kind, [{name: guard.wrap(tool) for name, tool in row.items()} for row in vars(trainer)[kind]])
        for kind in ("_sync_tool_dicts", "_async_tool_dicts")
    ]
    with readable_calls(guard.clean), replaced(*changes):
        yield


def collect_turns(trainer: ConstructedTrainer, rollout: Rollout, generated: Sequence[Any]) -> Turns:
    """Return the turns of what TRL's `_generate` has returned for a rollout.

    Raises:
        DataError: a row has other image tokens than its images take.
    """
    prompt_ids, completion_ids, own, messages, *_, images, returned = generated
    images = [[*(of_row or ())] for of_row in images or [()] * len(own)]
    fields = process_images(trainer, images) if any(returned) and trainer._is_vlm else {}
    if "image_grid_thw" in fields:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        refuse_mismatch(trainer, rollout.rows, ids, images, fields["image_grid_thw"])
    return Turns(own, images, returned, fields, messages)


def process_images(trainer: ConstructedTrainer, images: ImagesOfRows) -> dict[str, torch.Tensor]:
    """Return the pixel inputs that TRL makes of the images of all rows, where tools have returned some."""
    processor: Any = trainer.processing_class
    flat = [image for of_row in images for image in of_row]
    with process_with_options(processor):
        return image_tensors(processor.image_processor(images=flat, return_tensors="pt"))


def refuse_mismatch(
    trainer: ConstructedTrainer,
    rows: Sequence[Mapping[str, Any]],
    ids: Sequence[Sequence[int]],
    images: ImagesOfRows,
    grids: torch.Tensor,
) -> None:
    """Raise `DataError` if a row has other image tokens than its images take.

    TRL 1.16 then trains on all rows of the process without their images (`has_mismatch` in grpo_trainer.py).

    Args:
        ids: of prompts and completions.
        images: of each row.
        grids: patches of all images along time, height and width, (images, 3).
    """
    processor: Any = trainer.processing_class
    wanted = iter((grids.prod(-1) // getattr(processor.image_processor, "merge_size", 2) ** 2).tolist())
    for row, tokens, of_row in zip(rows, ids, images, strict=True):
        takes, count = sum(next(wanted) for _ in of_row), [*tokens].count(trainer._image_pad_token_id or -1)
        if count != takes:
            found = f"{count} image tokens with its completion, but its {len(of_row)} images take {takes}"
            cure = "use a chat template that writes the images of tool messages"
            raise DataError(f"The {describe_row(row)} has {found}: {cure}.")


def perturb_turns(turns: Turns, numbers: Sequence[int], which: str, perturb: Perturb) -> list[list[Image.Image]]:
    """Return the images of each row, those of its prompt first, of which some are perturbed.

    With `all`, what `vgr_trl.tools` show of the first image is the same part of the perturbed image.

    Args:
        numbers: per row, a number that rows with the same perturbed images of the prompt share, over all processes.
        which: `all`, or only those of the `prompt` or of `tools`.
        perturb: returns perturbed images, given their number and the place of the first in the row.
    """
    of_prompts: dict[int, list[Image.Image]] = {}
    shown = []
    for of_row, returned, number in zip(turns.images, turns.returned, numbers, strict=True):
        images, count = [*of_row], len(of_row) - len(returned)
        if which != "tools":
            if number not in of_prompts:
                of_prompts[number] = perturb(images[:count], index=number)
            images[:count] = of_prompts[number]
        if which != "prompt":
            images[count:] = perturb(images[count:], index=number, first=count)
        if which == "all" and count:
            parts = [show_again(part, images[0]) for part in of_row[count:]]
            images[count:] = [part or other for part, other in zip(parts, images[count:], strict=True)]
        shown.append(images)
    return shown


def rows_perturbed(turns: Turns, which: str) -> torch.Tensor:
    """Return which rows have an image that `perturb_turns` perturbs, (N,) bool."""
    returned = torch.tensor([*map(len, turns.returned)])
    every = torch.tensor([*map(len, turns.images)])
    return {"all": every, "tools": returned, "prompt": every - returned}[which] > 0


TURN_COLUMNS = ("num_turns", "num_tool_calls", "num_returned_images")


def count_turns(completions: Sequence[Any], turns: Turns) -> dict[str, list[int]]:
    """Return the columns `TURN_COLUMNS` that rewards get: messages of the policy, of tools, and images of tools."""
    roles = [[message["role"] for message in completion] for completion in completions]
    counts = ([each.count("assistant") for each in roles], [each.count("tool") for each in roles])
    return dict(zip(TURN_COLUMNS, (*counts, [*map(len, turns.returned)]), strict=True))
