"""Faults of TRL, transformers, vLLM and gloo: each with its link, and what makes the repair removable."""

import atexit
import copy
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from packaging.version import Version
from PIL import Image
from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, ProcessorMixin, Trainer
from trl import GRPOTrainer
from trl.generation import vllm_client
from trl.trainer import grpo_trainer

from vgr_trl.batch import causal_type
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import images_of
from vgr_trl.sharing.model_support import prefers_cudnn
from vgr_trl.utils import ConfigError, VLLMServerError, error_text, patched_attribute, printable, release

# Prompts and completions in the form that tables of completions can hold and show.

TABLES = "completions_[0-9]*.parquet"


def as_text(messages: Any) -> Any:
    """Return a conversation as one text, with `<image>` for an image, and characters that do not show as their numbers.

    A column of a table has one type, and trackers show texts. The messages of a prompt with images are lists of parts,
    one of which has no text: wandb 0.31 refuses them, trackio 0.43 shows `[object Object]`, and Parquet cannot hold
    them beside prompts without images, whose content is a text (seen with TRL 1.16).

    TRL prints the table too, and passes on what clears a terminal, renames its window or reorders a line.

    Args:
        messages: with a `role` and a `content` that is a text or a list of parts; a text is a text, and anything else
            is returned as it is.

    Returns:
        The content of a single message; of several, each behind its role.
    """
    if isinstance(messages, str):
        return printable(messages)
    if not isinstance(messages, list):
        return messages
    if len(messages) == 1:
        return printable(_content(messages[0]))
    return printable("\n\n".join(f"{message['role']}: {_content(message)}" for message in messages))


@contextmanager
def in_texts(columns: dict[str, Any], names: Iterable[str] = ("prompt", "completion")) -> Iterator[None]:
    """In this block, the columns of these names hold the texts of their conversations; afterwards what they held."""
    kept = {name: columns[name] for name in names}
    columns.update({name: [as_text(messages) for messages in column] for name, column in kept.items()})
    try:
        yield
    finally:
        columns.update(kept)


@contextmanager
def beside_training(output_dir: str | None, step: int, evaluates: bool) -> Iterator[None]:
    """In this block TRL writes its table of completions; that of an evaluation then gets a name of its own, `…_eval`.

    TRL 1.16 names both by the step, so that an evaluation replaced the table of training of its step.

    Args:
        evaluates: whether it is one of an evaluation, which this process writes.
    """
    file = _folder(output_dir) / f"completions_{step:05d}.parquet"
    kept = file.with_suffix(".training")
    if evaluates and file.exists():
        file.replace(kept)
    try:
        yield
    finally:
        if evaluates and file.exists():
            file.replace(file.with_name(f"{file.stem}_eval.parquet"))
        if evaluates and kept.exists():
            kept.replace(file)


def remove_oldest_tables(output_dir: str | None, max_bytes: float) -> None:
    """Remove the oldest tables of completions, except the first, until all have at most `max_bytes` together."""
    sizes = {path: path.stat().st_size for path in sorted(_folder(output_dir).glob(TABLES), key=_step)}
    total = sum(sizes.values())
    for path in list(sizes)[1:-1]:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= sizes[path]


def _folder(output_dir: str | None) -> Path:
    return Path(output_dir or "trainer_output", "completions")


def _step(path: Path) -> tuple[int, str]:
    return int(path.stem.split("_")[1]), path.name


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    text = "".join(str(part["text"]) if part.get("type") == "text" else f"<{part.get('type')}>" for part in parts)
    return text + (f" {message['tool_calls']}" if message.get("tool_calls") else "")


# `ddp_timeout` on a CPU, where transformers 5.23 does not hand it to the process group: it stays at 30 minutes.


def give_timeout(seconds: int) -> None:
    """Let processes that talk by gloo wait for each other as long as `ddp_timeout` says."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        _set_pg_timeout(timedelta(seconds=seconds))


# The end of a process of several: its group is closed while the interpreter still runs.
#
# Gloo frees a finished collective in a thread of its own, which needs the interpreter's lock. After the interpreter
# has shut down that thread is ended in the middle of it (`terminate called without an active exception`,
# pytorch/pytorch #190489); while the lock is held by whoever destroys the group, both wait forever. The thread
# outlives a group that was destroyed but is still referred to, as by DDP and DeepSpeed. Removable when torch waits
# for it.

_SEEN = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_SECONDS, _MOST = 0.1, 60.0  # between two looks at the threads, and in all


def close_group_at_exit() -> None:
    """Close the process group there is when this process ends by itself; if it was closed before, let gloo finish."""
    atexit.unregister(_close)
    if distributed.is_available() and distributed.is_initialized():
        atexit.register(_close)


def let_gloo_finish() -> None:
    """Let go of the interpreter's lock until gloo has freed the last collective, so that the group can be destroyed.

    Its threads are at rest then: they sleep, and between two looks none was woken, as one is that waits for the lock.
    Where threads cannot be looked at the time of two looks has to do.
    """
    before: list[str] | None = None
    for _ in range(int(_MOST / _SECONDS)):
        time.sleep(_SECONDS)
        now = _what_threads_did()
        if now == before and not any(line.startswith("State:") and "sleeping" not in line for line in now):
            return
        before = now


def _what_threads_did() -> list[str]:
    """Of each of gloo's threads (of Linux) whether it sleeps, and how often it was given and lost a core."""
    found: list[str] = []
    for status in sorted(Path("/proc/self/task").glob("*/status")):
        with suppress(OSError):  # it has ended
            name, *lines = status.read_text().splitlines()
            if name.endswith("pt_gloo_runloop"):
                found += [line for line in lines if line.startswith(_SEEN)]
    return found


def _close() -> None:
    let_gloo_finish()
    failed = getattr(sys, "last_value", None) is not None  # a collective may be pending then, for ever
    if distributed.is_initialized() and not failed:
        distributed.destroy_process_group()


# The images of the table of completions, gathered by all processes or by none.
#
# TRL gathers them where the rows of a process have images, so rows with images on one process and without on another
# end in a hang or an abort (grpo_trainer of TRL 1.16, `log_multimodal`); and where only some batches have images,
# those of a table stand beside the wrong completions.


@contextmanager
def images_logged_by_all(trainer: GRPOTrainer, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Log the images of these rows in place of TRL, which is about to log the completions; all processes call this.

    Runs with tools keep TRL's way, which knows the images that tools return.
    """
    if not trainer.log_multimodal or trainer.tools or trainer.environment_factories:
        yield
        return
    with patched_attribute(trainer, "log_multimodal", False):
        yield
    gathered = gather_object([images_of(row) or _in_messages(row.get("prompt")) for row in rows])
    logged: Any = trainer._logs["images"]
    if any(gathered) or logged:
        without = len(trainer._logs["prompt"]) - len(gathered) - len(logged)
        logged.extend([[] for _ in range(without)])
        logged.extend(gathered)


def _in_messages(prompt: Any) -> list[Any]:
    messages = prompt if isinstance(prompt, list) else []
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None]


# What TRL's loss divides by, which it computes within `_compute_loss` and gives nobody.
#
# A term that is added to the loss has to be averaged as the loss is. Removable when TRL offers its normaliser; the
# tests compare with TRL's own loss for all its types (tests/training/test_loss_terms.py).

_PER_COMPLETION = ("grpo", "sapo")
_PER_WINDOW = ("dapo", "cispo", "vespo")


def average_as_loss(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    inputs: dict[str, Any],
    args: DAPOConfig,
    *,
    accumulation_steps: int,
    num_processes: int,
) -> torch.Tensor:
    """Return the average of a term such that it has the scale of the loss it is added to, as TRL 1.16 divides.

    Args:
        per_token: (N, T) values of the term.
        mask: (N, T) tokens that count in the loss.
        inputs: the micro-batch, with `num_items_in_batch`, the valid tokens of the rollout over all processes.
        accumulation_steps: micro-batches of the current optimizer step.
    """
    total = (per_token * mask).sum()
    if args.loss_type in _PER_WINDOW:
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / num_processes
        of_window: torch.Tensor = tokens * accumulation_steps / args.steps_per_generation
        return total / of_window
    if args.loss_type in _PER_COMPLETION:
        means = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)  # (N,)
        return means.mean() / accumulation_steps
    if args.loss_type == "bnpo":
        return total / mask.sum().clamp(min=1.0) / accumulation_steps
    if args.loss_type == "dr_grpo":
        return total / (per_token.size(0) * int(args.max_completion_length or 1)) / accumulation_steps
    return (per_token * mask).sum(-1).mean() / accumulation_steps  # luspo


# Weights of a vision-language model resumed under the names they were saved with.
#
# transformers saves vision-language models under other names than their parameters have. `from_pretrained` renames
# them back; the trainer's own loading does not, and then keeps the weights of the start with a warning (seen with
# transformers 5.23 and Qwen2.5-VL). Removable when `Trainer._load_from_checkpoint` renames.


def whole_model(trainer: Trainer, model: Any) -> PreTrainedModel | None:
    """Return the model inside, if it is whole and unsharded: where the trainer would keep the weights of the start."""
    target = trainer.accelerator.unwrap_model(model)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return target if isinstance(target, PreTrainedModel) and not sharded else None


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Set the weights of `model`, in place, to those saved in the folder `checkpoint`.

    Raises:
        ConfigError: the checkpoint cannot be read, is of another architecture or size, or lacks weights.
    """
    loading: Any = type(model)
    try:
        if (kind := AutoConfig.from_pretrained(checkpoint).model_type) != model.config.model_type:
            raise ValueError(f"it is a {kind}, not a {model.config.model_type}")
        saved, report = loading.from_pretrained(
            checkpoint,
            config=copy.deepcopy(model.config),
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, report.get(kind) or ())):
                raise ValueError(f"it has {len(names)} {kind.replace('_', ' ')}: {', '.join(names[:3])}, …")
        model.load_state_dict(saved.state_dict(), strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"The checkpoint {checkpoint} does not fit the model {type(model).__name__} ({error_text(error)}): "
            "continue with the model that it was saved from, or give an earlier checkpoint."
        ) from error


# What TRL logs of a rollout batch, where further rounds of prompts belong to the same batch.


def merge_rounds(metrics: dict[str, list[float]], before: dict[str, int], completions: list[int]) -> None:
    """Make one entry of what was logged for the batch and for each further round, in place.

    Means are weighted by completions; of smallest and largest values the smallest and the largest is kept.

    Args:
        metrics: name -> values since they were last logged.
        before: name -> how many values there were before the first further round.
        completions: on a process, of the batch and of each further round.
    """
    for name, values in metrics.items():
        rounds = len(values) - before.get(name, 0)
        if rounds == len(completions) - 1 > 0 and before.get(name):
            newest = [values.pop() for _ in completions][::-1]
            known = [(value, count) for value, count in zip(newest, completions, strict=True) if value == value]
            values.append(_merged(name, known) if known else float("nan"))


def _merged(name: str, values: list[tuple[float, int]]) -> float:
    extreme = re.search(r"(?:^|[/_])(min|max)(?:[/_]|$)", name)
    if extreme is not None:
        return (min if extreme[1] == "min" else max)(value for value, _ in values)
    return sum(value * count for value, count in values) / sum(count for _, count in values)


def replace_newest(values: deque[Any], newest: list[Any]) -> None:
    """Put `newest` in the place of the last values of a column, as many."""
    for _ in newest:
        values.pop()
    values.extend(newest)


def let_tables_hold(logs: dict[str, Any], count: int) -> None:
    """Make room for `count` rows in the table of completions, in place; TRL's holds one rollout batch."""
    for name, values in logs.items():
        if isinstance(values, deque):
            logs[name] = deque(values, maxlen=count)
        else:
            logs[name] = defaultdict(lambda: deque(maxlen=count), values)


def keep_newest(logs: dict[str, Any], count: int) -> None:
    """Drop all but the last `count` rows of the table of completions, in place: those of earlier rollouts."""
    for values in logs.values():
        for column in [values] if isinstance(values, deque) else values.values():
            while len(column) > count:
                column.popleft()


@contextmanager
def as_one_batch(trainer: GRPOTrainer, completions: int) -> Iterator[list[int]]:
    """Let what TRL logs of rollout batches generated in this block belong to the one before it.

    Args:
        completions: of that batch, on this process.

    Yields:
        Completions of a process in that batch, and in each further one, for which the block adds an entry.
    """
    metrics = trainer._metrics["train"]
    logged = {name: len(values) for name, values in metrics.items()}
    keep_newest(trainer._logs, completions * trainer.accelerator.num_processes)
    rounds = [completions]
    yield rounds
    merge_rounds(metrics, logged, rounds)


@contextmanager
def unlogged(trainer: GRPOTrainer) -> Iterator[None]:
    """Generate and reward in this block without a trace in metrics, tables and counts."""
    logs = *trainer._metrics.values(), trainer._pending_extra_logs, trainer._pending_metrics
    before = [{name: list(values) for name, values in log.items()} for log in logs]
    tokens = trainer.state.num_input_tokens_seen
    try:
        yield
    finally:
        for log, kept in zip(logs, before, strict=True):
            log.clear()
            log.update(kept)
        trainer.state.num_input_tokens_seen = tokens


# Attention by cuDNN, which `sdpa` takes first with torch 2.11 and later on Hopper and Blackwell.
#
# Where a mask is passed, as it is behind every shared prompt, and a length is 64 modulo 128, its gradient of queries
# can be NaN (pytorch#196678, trl#7181); and it builds a plan for every new shape, of which uneven lengths make several
# a step. Removable when the oldest torch that is taken has the first mended.


def without_cudnn_attention() -> str | None:
    """Switch it off in this process, and return a sentence that says so; None where it would not be taken."""
    if not prefers_cudnn():
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return (
        f"cuDNN's attention is off: behind shared prompts its gradients can be NaN (pytorch#196678, torch "
        f"{torch.__version__}); cudnn_attention turns it on."
    )


# Completions without image tokens: TRL before 1.16 lets the policy sample them.
#
# A sampled image token stands for an image that is not there, and the next pass fails (`Image features and image
# tokens do not match`). TRL 1.16 suppresses it; this does the same. Removable with TRL 1.15.


def suppress_image_tokens(trainer: GRPOTrainer, installed: str | None = None) -> None:
    """Let the constructed `trainer` generate no image tokens, where TRL does not see to it.

    Args:
        trainer: with transformers' generation; one with vLLM's is left alone, as by TRL.
    """
    model: Any = trainer.model
    token = getattr(model.config, "image_token_id", None)
    if release(installed) >= Version("1.16") or trainer.use_vllm or token is None:
        return
    if isinstance(trainer.processing_class, ProcessorMixin):
        options = {"suppress_tokens": [token], **trainer.generation_kwargs}
        trainer.generation_kwargs = options
        trainer.generation_config = GenerationConfig(**options, disable_compile=True)


# Pixels of Idefics and SmolVLM, which lie by rows, padded to the most images of a row.
#
# TRL 1.16 cuts them by images where a batch has as many images as rows, though rows differ (2, 1, 1, 0): rows then get
# pixels of their neighbours, and nothing fails. Removable with a TRL that tells the two apart.


def lie_by_rows(inputs: Mapping[str, Any]) -> bool:
    """Whether the pixel inputs of a batch or a pass have one entry per row, as TRL too has it of their mask."""
    return inputs.get("pixel_attention_mask") is not None and inputs.get("spatial_shapes") is None


@contextmanager
def rows_kept_whole() -> Iterator[None]:
    """In this block TRL shuffles pixels that lie by rows with their rows."""
    split = grpo_trainer.split_pixel_values_by_grid
    with patched_attribute(
        grpo_trainer, "split_pixel_values_by_grid", lambda batch: batch if lie_by_rows(batch) else split(batch)
    ):
        yield


# Token types of completions, where prompts have some: they must not let a completion see what comes after it.


def with_causal_completions(inputs: Mapping[str, Any], config: Any, completion_length: int) -> dict[str, Any]:
    """Return inputs of a pass whose token types (N, P + T) are `causal_type` in the completions.

    TRL pads them with 0 there, which in PaliGemma lets completions see their own future.

    Args:
        inputs: by name; those without token types are returned as they are.
    """
    changed = dict(inputs)
    value = changed.get("token_type_ids")
    if value is not None and (kind := causal_type(config, "token_type_ids")):
        completions = value.new_full((len(value), completion_length), kind)
        changed["token_type_ids"] = torch.cat([value[:, :-completion_length], completions], dim=1)
    return changed


# Features of images that vLLM keeps: forgotten when it gets new weights.
#
# vLLM keeps what the vision tower makes of an image, by the content of the image alone. After new weights TRL 1.16
# has it forget the prompts it has read, not the images, so an image that came in an earlier step is answered as the
# earlier weights saw it. Nothing fails. See https://github.com/huggingface/trl/issues/7198; to be removed with a TRL
# that calls `reset_encoder_cache` itself.


def forget_with_new_weights(trainer: GRPOTrainer) -> None:
    """Have the vLLM of a constructed trainer of images forget their features whenever it gets new weights."""
    if not (trainer.use_vllm and trainer._is_vlm):
        return
    generation: Any = trainer.vllm_generation
    plain = generation.sync_weights

    def sync_weights() -> None:
        plain()
        forget_image_features(generation)

    generation.sync_weights = sync_weights


def forget_image_features(generation: Any) -> None:
    """Empty the cache of image features of vLLM, by the process that speaks to it.

    Raises:
        VLLMServerError: the server refuses.
    """
    if generation.mode == "colocate":
        generation.llm.llm_engine.reset_encoder_cache()
    elif generation.accelerator.is_main_process:
        client = generation.vllm_client
        answer = client.session.post(f"{client.base_url}/reset_encoder_cache")
        if answer.status_code != 200:
            raise VLLMServerError(
                f"The vLLM server at {client.base_url} answers reset_encoder_cache with {answer.status_code}, and "
                "would go on with features of images from older weights: start a release from 0.22 on, with "
                "VLLM_SERVER_DEV_MODE=1."
            )


# Prompts with images for vLLM: one placeholder token per image where vLLM writes the others itself.
#
# TRL 1.15 and 1.16 give a colocated vLLM the images, and prompts in which every image already takes n placeholder
# tokens. vLLM reads the first of them as the whole image and writes n tokens in its place, so the model is prompted
# with 2n - 1 of them, n - 1 of which stand for nothing. Nothing fails; the completions answer another prompt than the
# one trained on. The release of vLLM makes no difference: 0.11 to 0.32 write the placeholders of any prompt of tokens,
# one per image is the input they document, and a release that left other prompts alone would take these too. See
# https://github.com/huggingface/trl/issues/6294.

PROBE_SIZE = (64, 64)


def collapse_images(
    prompt_ids: Sequence[Sequence[int]],
    images_per_prompt: Sequence[int],
    image_token_id: int,
    tokens_per_image: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the prompts with one placeholder token for each image; images that touch stay apart.

    Args:
        prompt_ids: tokens of N prompts.
        images_per_prompt: images of each of the N prompts.
        image_token_id: the placeholder token, which stands once or more for each image.
        tokens_per_image: placeholder tokens of every image, prompt after prompt; None: not known, which is enough as
            long as no two images touch.

    Raises:
        ConfigError: it is ambiguous which placeholder tokens of a prompt belong to which image.
    """
    sizes = None
    if tokens_per_image is not None and len(tokens_per_image) == sum(images_per_prompt):
        sizes = iter(tokens_per_image)
    collapsed = []
    for row, (ids, images) in enumerate(zip(prompt_ids, images_per_prompt, strict=True)):
        mine = None if sizes is None else list(islice(sizes, images))
        runs = [len(list(run)) for is_image, run in groupby(ids, image_token_id.__eq__) if is_image]
        counts = _images_per_run(runs, images, mine)
        if counts is None:
            raise ConfigError(
                f"Prompt {row} has {len(runs)} runs of the image token {image_token_id}, of {runs} tokens, for "
                f"{images} images{'' if mine is None else f' of {mine} tokens'}, so which of them "
                "belong to which image is ambiguous: put text between images, or generate with use_vllm=False."
            )
        collapsed.append(list(_with_runs(ids, image_token_id, counts)))
    return collapsed


def _images_per_run(runs: Sequence[int], images: int, sizes: Sequence[int] | None) -> list[int] | None:
    """How many images each run of placeholder tokens stands for; None if that cannot be told."""
    if len(runs) == images:
        return [1] * images
    if sizes is None:
        return None
    counts, rest = [], list(sizes)
    for length in runs:
        count = 0
        while length > 0 and rest:
            length -= rest.pop(0)
            count += 1
        if length != 0:
            return None
        counts.append(count)
    return None if rest else counts


def _with_runs(ids: Sequence[int], token: int, lengths: Sequence[int]) -> Iterator[int]:
    """The tokens `ids`, in which the runs of `token` get other lengths."""
    remaining = iter(lengths)
    for is_token, run in groupby(ids, token.__eq__):
        yield from [token] * next(remaining) if is_token else run


@dataclass(frozen=True)
class VLLMImages:
    """What TRL has to be given to generate with vLLM.

    Attributes:
        image_token_id: the placeholder token of images; None if prompts stay as the processor wrote them.
        merge_size: of the image processor, which merges so many patches along each side into one token; None if it has
            none, and no `image_grid_thw`.
        why_not: why prompts with images cannot be generated from, if they cannot.
    """

    image_token_id: int | None = None
    merge_size: int | None = None
    why_not: str | None = None

    def prepared(self, prompt_ids: Any, images: Any, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return prompts and images as TRL has to hand them to vLLM.

        Args:
            fields: what the processor made beside the tokens; `image_grid_thw`, if there is one, is (images, 3).

        Raises:
            ConfigError: see `collapse_images` and `plan_vllm_images`.
        """
        if images is None:
            return prompt_ids, None
        if self.why_not is not None:
            raise ConfigError(self.why_not)
        if self.image_token_id is not None:
            counts = [len(row or ()) for row in images]
            prompt_ids = collapse_images(prompt_ids, counts, self.image_token_id, self._tokens_per_image(fields))
        return prompt_ids, [row or None for row in images]  # of an empty list TRL would take the first image

    def _tokens_per_image(self, fields: Mapping[str, Any]) -> list[int] | None:
        grid = fields.get("image_grid_thw")
        if grid is None or self.merge_size is None:
            return None
        return [int(t) * int(h) * int(w) // self.merge_size**2 for t, h, w in grid]


def plan_vllm_images(trainer: GRPOTrainer, has_images: bool) -> VLLMImages | None:
    """Return what stands between the prompts and vLLM in the constructed `trainer`; None if nothing does.

    Raises:
        ConfigError: prompts with images have to be collapsed, but the processor does not write images as repetitions
            of one token. If the data have no images, this is raised when the first arrives.
    """
    if not (trainer.use_vllm and trainer._is_vlm):
        return None
    args: Any = trainer.args
    if args.vllm_mode != "colocate":  # to a server TRL sends processed images with their places in the prompt
        return VLLMImages()
    processor: Any = trainer.processing_class
    if repeats_one_token(processor):
        token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        return VLLMImages(token, getattr(processor.image_processor, "merge_size", None))
    why_not = (
        f"use_vllm is on with vllm_mode=colocate and {type(processor).__name__}, which writes more for an image than "
        f"one repeated token: TRL {version('trl')} would have vLLM write that a second time, so set use_vllm=False."
    )
    if has_images:
        raise ConfigError(why_not)
    return VLLMImages(why_not=why_not)


def repeats_one_token(processor: Any) -> bool:
    """Return whether `processor` writes every image as repetitions of its token `image_token`, and nothing else.

    True of LLaVA, LLaVA-Next and the Qwen-VL family. False of Gemma 3, InternVL, Idefics3 and SmolVLM, which add tokens
    around an image or between its tiles, of processors without an `image_token`, and of those that want another token
    in a text for an image (Gemma 3 before transformers 5.11).
    """
    text = getattr(processor, "image_token", None)
    if not isinstance(text, str):
        return False
    token = processor.tokenizer.convert_tokens_to_ids(text)
    unexpanded = processor.tokenizer([text])["input_ids"][0]
    try:
        written = processor(text=[text], images=[[Image.new("RGB", PROBE_SIZE)]])["input_ids"][0]
    except ValueError:
        return False
    runs = sum(is_image for is_image, _ in groupby(written, token.__eq__))
    return runs == 1 and list(_with_runs(written, token, [1])) == list(unexpanded)


# Log-probabilities of prompts with images as a server of vLLM 0.32 sends them, for TRL 1.16 to read.
#
# TRL looks for each token's `token`, a text such as "token_id:17", which vLLM sent up to 0.31; from 0.32 on
# `/inference/v1/generate` sends its `token_id`, a number, and TRL ends with a KeyError. To be removed with a TRL that
# reads both.


@contextmanager
def readable_logprobs() -> Iterator[None]:
    """In this block TRL's client reads log-probabilities in both forms."""
    plain = vllm_client.parse_logprobs
    with patched_attribute(
        vllm_client, "parse_logprobs", lambda choices: plain([with_texts(choice) for choice in choices])
    ):
        yield


def with_texts(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the log-probabilities of a completion with a `token` for every `token_id`, also among the most likely."""
    if logprobs is None or not logprobs.get("content"):
        return logprobs
    entries = [{**each, "top_logprobs": each.get("top_logprobs") or []} for each in logprobs["content"]]
    for entry in entries:
        entry["top_logprobs"] = [{"token": f"token_id:{top.get('token_id')}", **top} for top in entry["top_logprobs"]]
    content = [{"token": f"token_id:{entry.get('token_id')}", **entry} for entry in entries]
    return {**logprobs, "content": content}
