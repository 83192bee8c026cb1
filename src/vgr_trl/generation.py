"""Generate one turn: share prompts, measure attention, guard tools and keep their turns; answer questions blindly."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from vgr_trl.batch import Prompts, Turns
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import read_image
from vgr_trl.data.prompts import format_question, special_tokens, texts_of
from vgr_trl.errors import DataError, error_text
from vgr_trl.passes.run_pass import around_generation
from vgr_trl.patches.transformers import without_input_gradients
from vgr_trl.patches.trl import readable_calls
from vgr_trl.pixels import image_tensors
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.rewards.answers import decode_with_tags
from vgr_trl.rollout import Rollout, describe_row
from vgr_trl.rollout_checks import generate_with_logps, refuse_dropped_images
from vgr_trl.run import Run
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.probe import GenerationProbe
from vgr_trl.views.perturbed_pass import perturb_noisy_prompts, process_images


def generate(
    run: Run,
    rollout: Rollout | None,
    prompts: Prompts,
    num_generations: int,
    plain: Callable[[Any, Any, Any, int], Any],
    *,
    checks_images: bool,
    keeps_logps: bool,
) -> Any:
    """Generate one turn as TRL's `_generate_single_turn` does; keep the prompts of the rollout's first turn.

    Args:
        run: model, options and measurements.
        rollout: the rollout of the batch; None outside of rollouts.
        prompts: prompts of this turn.
        num_generations: completions per prompt; a vLLM server gets the adjacent equal prompts of a group once.
        plain: TRL's method.
        checks_images: whether prompts without the placeholders of their images are refused.
        keeps_logps: whether log-probabilities of `generate` are returned too.
    """
    model, measurement, args = run.model, run.measurement, run.args
    first_turn = rollout is not None and rollout.prompts is None
    if rollout is not None and first_turn:
        if checks_images and not rollout.blind:
            refuse_dropped_images(prompts, measurement.vision_token_ids)
        scores_all = measurement.scoring and not (measurement.samples and run.trains)
        if scores_all and not args.use_vllm:  # scoring reads the same pixels on the device
            pixels = image_tensors(prompts.fields).get("pixel_values")
            fields = {} if pixels is None else run.to_device({"pixel_values": pixels})
            prompts = replace(prompts, fields={**prompts.fields, **fields})
        rollout.prompts = prompts
        prompts = perturb_noisy_prompts(run, rollout, prompts)
        if rollout.noise is not None or rollout.blind:  # prompts differ within a group
            num_generations = 1
    images: Any = prompts.images
    if args.use_vllm and images is not None:
        images = [row or None for row in images]  # TRL reads the first image of every list
    sample = partial(plain, prompts.ids, images, prompts.fields, num_generations)
    with (
        run.clock.stage("generation", run.trains),
        around_generation(run, model),
        without_input_gradients(model),
    ):
        measures = "attention" in measurement.needed and args.attention_source == "generate"
        if rollout is None or rollout.blind or not (first_turn and measures):
            return generate_with_logps(causal_model(model), args.temperature, sample) if keeps_logps else sample()
        tokens = {"vision_token_ids": measurement.vision_token_ids, "special_token_ids": measurement.special_token_ids}
        with GenerationProbe(model, **tokens, temperature=args.temperature) as probe:
            generated = sample()
        rollout.generated = RolloutSignals(probe.logps, probe.entropies, probe.mass.mask, probe.mass)
        return generated


def eval_sampling(args: DAPOConfig, training: bool) -> dict[str, float]:
    """Return the sampling options that override the training options in evaluation; {} in training."""
    overrides = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    return {name: value for name, value in overrides.items() if value is not None and not training}


def blind_answers(
    run: Run,
    rollout: Rollout,
    completion_ids: list[list[int]],
    answer: Callable[[list[dict[str, Any]], list[Any]], list[str]],
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Answer questions from the descriptions in completions; return the reward column and metrics.

    A completion without a description gets None. One generation gives an answer for every completion of this process;
    answers are neither trained on nor counted among the run's tokens.

    Args:
        run: tokenizer, options and processes.
        rollout: rows of the data.
        completion_ids: tokens of each completion.
        answer: samples an answer to a conversation about each row.
    """
    args, gather = run.args, run.accelerator.gather
    texts = decode_with_tags(run.tokenizer, completion_ids, f"<{args.blind_tag}></{args.blind_tag}>")
    described = [extract_description(text, args.blind_tag, args.blind_without_tag == "completion") for text in texts]
    conversations = [
        blind_conversation(args.blind_prompt, question_of(row), description or "")
        for row, description in zip(rollout.rows, described, strict=True)
    ]
    sampled = answer(rollout.rows, conversations)
    answers = [None if text is None else reply for text, reply in zip(described, sampled, strict=True)]
    share = torch.tensor([reply is not None for reply in answers], device=run.accelerator.device)
    return {BLIND_ANSWERS: answers}, {"blind/described": gather(share).float().mean().item()}


def extract_description(text: str, tag: str, or_all: bool) -> str | None:
    """Return the text between the first pair of tags, stripped.

    Args:
        text: text of a completion.
        tag: name of the tags.
        or_all: return the whole text if there are no tags, instead of None.
    """
    behind, closed, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    if closed:
        return behind.strip()
    return text if or_all else None


def question_of(row: Mapping[str, Any]) -> str:
    """Return the question of a row with its options, without image placeholders.

    The question is the column `problem`, or else the text of the prompt's last message.
    """
    problem = row.get("problem")
    if isinstance(problem, str):
        text = format_question(problem, row.get("choices"))
    else:
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else "\n".join(texts_of(prompt[-1:]))
    return text.replace("<image>", "").strip()


def blind_conversation(template: str, question: str, description: str) -> list[dict[str, str]]:
    """Build the conversation that asks a question about a description.

    Args:
        template: text with `{description}` and `{question}`.
        question: replaces `{question}`.
        description: replaces `{description}`.
    """
    values = {"description": description, "question": question}
    content = re.sub(r"\{(description|question)\}", lambda match: values[match[1]], template)
    return [{"role": "user", "content": content}]


@contextmanager
def guarded(processor: Any, is_vlm: bool, dicts: Sequence[Any]) -> Iterator[list[Any]]:
    """Guard the run in this block against malformed tool calls and results; yield the tools, guarded.

    Args:
        processor: processor of the model, or its tokenizer.
        is_vlm: whether the model reads images.
        dicts: tools by name, a list of such dictionaries with one per row for each kind of tools.
    """
    guard = ToolGuard(special_tokens(processor), processor.image_processor if is_vlm else None)
    with readable_calls(guard.clean):
        yield [[{name: guard.wrap(tool) for name, tool in row.items()} for row in rows] for rows in dicts]


def collect_turns(run: Run, rollout: Rollout, generated: Sequence[Any], image_token: int | None) -> Turns:
    """Collect the turns of completions from the return value of TRL's `_generate`.

    Where image tokens and images of a row do not match, TRL 1.16 would train on all rows of the process without their
    images (`has_mismatch` in grpo_trainer.py).

    Args:
        run: processor of the model.
        rollout: rows of the data, one per completion.
        generated: return value of `_generate`.
        image_token: placeholder token of images.

    Raises:
        DataError: the image tokens of a row do not match its images.
    """
    prompt_ids, completion_ids, is_own, messages, *_, images, returned = generated
    images = [[*(of_row or ())] for of_row in images or [()] * len(is_own)]
    fields = process_images(run.processor, images) if any(returned) and run.facts.is_vlm else {}
    if "image_grid_thw" in fields:
        lengths = fields["image_grid_thw"].prod(-1) // getattr(run.processor.image_processor, "merge_size", 2) ** 2
        token_counts = iter(lengths.tolist())  # tokens of each image, row by row
        for row, prompt, completion, of_row in zip(rollout.rows, prompt_ids, completion_ids, images, strict=True):
            expected, count = sum(next(token_counts) for _ in of_row), [*prompt, *completion].count(image_token or -1)
            if count != expected:
                mismatch = f"{count} image tokens with its completion, but its {len(of_row)} images take {expected}"
                cure = "use a chat template that writes the images of tool messages"
                raise DataError(f"The {describe_row(row)} has {mismatch}: {cure}.")
    return Turns(is_own, images, returned, fields, messages)


TURN_COLUMNS = ("num_turns", "num_tool_calls", "num_returned_images")


def count_turns(completions: Sequence[Any], turns: Turns) -> dict[str, list[int]]:
    """Count the policy's messages, the tools' messages and the tools' images; return `TURN_COLUMNS`."""
    roles = [[message["role"] for message in completion] for completion in completions]
    counts = ([speakers.count("assistant") for speakers in roles], [speakers.count("tool") for speakers in roles])
    return dict(zip(TURN_COLUMNS, (*counts, [*map(len, turns.returned)]), strict=True))


@dataclass(frozen=True)
class ToolGuard:
    """Turns results of tools into text and images that the model can read, and failures into errors.

    TRL shows the text of an error to the policy and counts it in `tools/failure_frequency`.

    Attributes:
        special: matches the special tokens of the tokenizer; None if there are none.
        process: image processor of the model; None for a text model.
    """

    special: re.Pattern[str] | None
    process: Callable[..., Any] | None

    def clean(self, text: str) -> str:
        """Replace special tokens by spaces and lone surrogates by `?`."""
        text = text.encode("utf-8", "replace").decode()
        return text if self.special is None else self.special.sub(" ", text)

    def wrap(self, tool: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool, synchronous or not."""

        async def call_async(**arguments: Any) -> Any:
            with self._naming_failure(tool):
                return self._read_result(await tool(**arguments))

        def call(**arguments: Any) -> Any:
            with self._naming_failure(tool):
                return self._read_result(tool(**arguments))

        return call_async if inspect.iscoroutinefunction(tool) else call

    @contextmanager
    def _naming_failure(self, tool: Callable[..., Any]) -> Iterator[None]:
        try:
            yield
        except SystemExit as error:  # would end training, or the event loop of asynchronous tools
            raise DataError(f"The tool {tool.__name__} called sys.exit({error.code!r}).") from error
        except Exception as error:
            raise DataError(self.clean(error_text(error, 1000))) from error

    def _read_result(self, result: Any) -> list[dict[str, Any]] | str:
        parts = [self._read_part(part) for part in result] if isinstance(result, list) else []
        return [part for part in parts if part] if parts and all(parts) else self.clean(str(result))

    def _read_part(self, part: Any) -> dict[str, Any] | None:
        """Return a text, or an image that the model can read, never opened by path or address; None for other types."""
        kind = part.get("type", "image" if "image" in part else "text") if isinstance(part, dict) else None
        if kind != "image":
            is_text = kind == "text" and "text" in part
            return {"type": "text", "text": self.clean(str(part["text"]))} if is_text else None
        if not isinstance(content := part.get("image"), bytes | Image.Image):
            raise DataError(f"The tool returned an image of type {type(content).__name__}: return Pillow's, or bytes.")
        image = read_image(content)
        if self.process is not None:
            self.process(images=[image], return_tensors="pt")
        return {"type": "image", "image": image}
