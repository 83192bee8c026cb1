"""Generate with transformers' continuous batching, whose requests are token ids, from prompts with images.

Each image token becomes an id of its own behind the vocabulary, by which its features and position are looked up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
import xxhash
from packaging.version import Version
from torch import Tensor, nn
from transformers.utils import logging
from trl.models.utils import unwrap_model_for_generation

from vgr_trl.batch import Batch, pad_rows
from vgr_trl.errors import ConfigError, VGRError
from vgr_trl.patching import evaluating, patched_attribute, patched_method
from vgr_trl.pixels import TOKEN_TYPES, UnknownParts, image_tensors, parts_by_tokens
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.sharing.model_support import (
    UnsupportedModel,
    base_of,
    causal_model,
    check_model,
    layer_types,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_split import find_groups, first_rows, is_image_token, take_pixels

logger = logging.get_logger(__name__)

Completions = tuple[list[list[int]], list[list[float]]]  # tokens and log-probabilities of each row

EXACT = 1e-4  # largest distance, in nats, at which returned log-probabilities serve as old ones
# Options of generation that read the tokens so far, or the end of them, and their values without effect.
_IGNORED = {
    "num_beams": 1, "stop_strings": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0,
}  # fmt: skip
_TOKENS_PER_PASS = 8192  # transformers' default, which also sizes its masks
_FREE = 0.85  # transformers starts no request while less than the rest of the pages is free


class BatchingError(VGRError, RuntimeError):
    """Continuous batching ended before all completions were complete."""


def why_not_batched(causal: Any) -> str | None:
    """Return why continuous batching cannot generate with a model that reads images, or None if it can."""
    base, text = base_of(causal), causal.config.get_text_config(decoder=True)
    try:
        check_model(base)
    except UnsupportedModel as error:
        return str(error)
    if unsupported := {*layer_types(base.config)} - {"full_attention", "sliding_attention"}:
        return f"layers of type {min(unsupported)}"
    if getattr(text, "num_kv_shared_layers", 0):
        return "layers that take their keys and values from another"
    return "images that see themselves" if text.model_type in ("gemma3_text", "gemma4_text") else None


@dataclass
class Requests:
    """Prompts as requests, with the features of their images and the rows of their completions.

    Attributes:
        ids: tokens of each request; the K image features have the ids from `vocabulary` on.
        rows: rows of the batch that get its completions.
        places: positions of its tokens; empty where tokens are counted.
        features: (1 + K, D), embeddings; the first belongs to all other tokens.
        positions: (3, 1 + K), or None where tokens are counted.
        deep: features that are added behind the first layers, (1 + K, D) each.
    """

    vocabulary: int
    ids: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    features: Tensor | None = None
    positions: Tensor | None = None
    deep: list[Tensor] = field(default_factory=list)


class _DecoderReached(Exception):
    """Ends a pass over prompts before their first layer."""


def make_requests(causal: Any, prompt_ids: Sequence[Sequence[int]], fields: Mapping[str, Any]) -> Requests:
    """Turn prompts into requests, equal prompts into one.

    Args:
        causal: transformers model.
        prompt_ids: tokens of each row.
        fields: further outputs of the processor, as TRL has them.
    """
    base, device = base_of(causal), causal.device
    ids, mask = pad_rows([list(map(int, row)) for row in prompt_ids], 0, "left")
    pixel_inputs, is_image, groups = image_tensors(fields), is_image_token(ids, base.config), list(range(len(ids)))
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= {name: pad_rows(fields[name], 0, "left")[0] for name in TOKEN_TYPES if name in fields}
    try:
        parts = parts_by_tokens(pixel_inputs, is_image) if pixel_inputs else {}
        by_row = [[pixel_inputs[name][slices[row]] for name, slices in parts.items()] for row in groups]
        groups = find_groups(ids, mask, by_row if pixel_inputs else None)
        kept = first_rows(groups)
        inputs = {name: value[kept] for name, value in inputs.items()} | take_pixels(pixel_inputs, parts, kept)
    except UnknownParts:  # equal prompts become one by the features of their images
        inputs |= pixel_inputs
    made = Requests(causal.get_input_embeddings().weight.size(0))
    ids, lengths = inputs["input_ids"], inputs["attention_mask"].sum(1).tolist()
    if pixel_inputs:
        read = _read_decoder_inputs(causal, {name: value.to(device) for name, value in inputs.items()})
        _add_images(made, read, ids, is_image_token(ids, base.config), lengths)
    made.ids = [row[-length:].tolist() for row, length in zip(ids, lengths, strict=True)]
    firsts = [made.ids.index(made.ids[group]) for group in groups]
    made.rows = [[row for row, first in enumerate(firsts) if first == name] for name in range(len(made.ids))]
    return made


def _read_decoder_inputs(causal: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a model over prompts up to its decoder; return the decoder's arguments."""
    read: dict[str, Any] = {}

    def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        read.update(kwargs)
        raise _DecoderReached

    with causal.get_decoder().register_forward_pre_hook(stop, with_kwargs=True), suppress(_DecoderReached):
        base_of(causal)(**inputs, use_cache=False)
    return read


def _add_images(made: Requests, read: Any, ids: Tensor, is_image: Tensor, lengths: Sequence[int]) -> None:
    """Give image tokens, (U, P) bool, ids by features and position: equal ids, which share pages, are equal inputs."""
    at = is_image.to(read["inputs_embeds"].device)
    deep = list(read.get("deepstack_visual_embeds") or ())
    features = torch.cat([read["inputs_embeds"][at], *(level.to(read["inputs_embeds"]) for level in deep)], dim=-1)
    keys: list[Any] = [xxhash.xxh3_128_digest(row) for row in features.cpu().contiguous().view(torch.uint8).numpy()]
    positions = read.get("position_ids")
    positions = positions[-3:] if positions is not None and positions.ndim == 3 else None  # (3, U, P)
    if positions is not None:
        keys = [*zip(keys, *positions[:, at].tolist(), strict=True)]
        made.places = [row[-length:].tolist() for row, length in zip(positions[0], lengths, strict=True)]
    order = {key: number for number, key in enumerate(dict.fromkeys(keys), made.vocabulary)}
    firsts = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))  # key -> first token with it
    ids[is_image] = torch.tensor([order[key] for key in keys], dtype=ids.dtype)
    kept = torch.tensor([firsts[key] for key in order], device=at.device, dtype=torch.int64)
    table = nn.functional.pad(features[kept], (0, 0, 1, 0))
    made.features, *made.deep = table.chunk(1 + len(deep), dim=-1)
    made.positions = None if positions is None else nn.functional.pad(positions[:, at][:, kept], (1, 0))


@contextmanager
def looking_up(causal: Any, requests: Requests, autocast: Any) -> Iterator[None]:
    """Let a model read requests in this block.

    Args:
        causal: transformers model.
        requests: prompts.
        autocast: returns the block of a forward pass; transformers makes them in a thread of its own.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    embed, plain, seen = causal.get_input_embeddings(), causal.forward, dict[str, Tensor]()
    prepare, update = ContinuousBatchingIOs.prepare_batch_tensors, PagedAttentionCache.update

    def forward(input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        is_image = input_ids >= requests.vocabulary
        seen["mask"], seen["index"] = is_image, torch.where(is_image, input_ids - requests.vocabulary + 1, 0)
        embeds = embed(input_ids.masked_fill(is_image, 0))
        if requests.features is not None:
            embeds = torch.where(is_image.unsqueeze(-1), requests.features[seen["index"]].to(embeds), embeds)
        if requests.positions is not None:
            position_ids = torch.where(is_image, requests.positions[:, seen["index"]], position_ids)  # (3, 1, Q)
        with autocast():
            return plain(inputs_embeds=embeds, position_ids=position_ids, **options)

    def add_deep_features(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        deep = [level[seen["index"]] for level in requests.deep]
        return args, options | {"visual_pos_masks": seen["mask"], "deepstack_visual_embeds": deep}

    def prepare_positions(batch: Any, requests_in_batch: list[Any], *args: Any, **options: Any) -> None:
        prepare(batch, requests_in_batch, *args, **options)
        positions = list[int]()
        for part in requests_in_batch:
            name, stop = part.state.request_id.partition("__child")[0], part.state.position_offset
            places = requests.places[int(name)] if name.isdigit() else []  # requests of a warm-up have other names
            offset = max(places) + 1 - len(places) if places else 0
            start = stop - part.query_length
            positions += [*places[start:stop], *(at + offset for at in range(max(start, len(places)), stop))]
        batch.position_ids[: len(positions)] = torch.tensor(positions, dtype=torch.int32)

    def update_with_cast(cache: Any, **states: Any) -> Any:
        cast = {name: states.pop(name).to(cache.dtype) for name in ("key_states", "value_states")}  # autocast mixes
        return update(cache, **cast, **states)

    with ExitStack() as patches:
        patches.enter_context(patched_method(causal, "forward", forward))
        patches.enter_context(patched_attribute(PagedAttentionCache, "update", update_with_cast))
        if requests.places:
            patches.enter_context(patched_attribute(ContinuousBatchingIOs, "prepare_batch_tensors", prepare_positions))
        if requests.deep:
            decoder = causal.get_decoder()
            patches.enter_context(decoder.register_forward_pre_hook(add_deep_features, with_kwargs=True))
            # Features are dense here, so a CUDA graph can add them.
            added = patched_method(decoder, "_deepstack_process", lambda states, mask, level: states + level)
            patches.enter_context(added)
        yield


class ContinuousBatching:
    """Generates the completions of rollouts by continuous batching, each prompt once.

    Args:
        run: model, options and processes.
        config: generation config of the trainer.
        pages: options of continuous batching.

    Attributes:
        is_exact: whether the log-probabilities of the first rollout equal those of its scoring pass; None before it.

    Raises:
        ConfigError: continuous batching cannot generate with this model or these options.
    """

    def __init__(self, run: Run, config: Any, pages: Any) -> None:
        self.run, self.pages, self._told = run, pages, False
        self.is_exact: bool | None = None
        name, causal = "use_transformers_continuous_batching", causal_model(run.model)
        if Version(version("transformers")) < Version("5.23"):
            raise ConfigError(f"{name} reads images with transformers 5.23 and later: upgrade it, or use use_vllm.")
        reason = "sharded parameters" if run.facts.is_sharded else why_adapter_reads_whole_rows(run.model)
        if (reason := reason or why_not_batched(causal)) is not None:
            raise ConfigError(f"{name} cannot be used with {type(causal).__name__} ({reason}): drop it.")
        from transformers.generation import logits_process

        for kind in (logits_process.SuppressTokensLogitsProcessor, logits_process.MinPLogitsWarper):
            kind.supports_continuous_batching = True  # they read scores alone, and transformers warns of others
        config = causal._prepare_generation_config(config)[0]
        for option, plain in _IGNORED.items():
            if (value := getattr(config, option)) not in (None, plain):
                raise ConfigError(f"{name} would ignore {option}={value}: drop one of the two.")

    def generate(
        self, wrapped: nn.Module, config: Any, overrides: Any, prompt_ids: Any, fields: Mapping[str, Any]
    ) -> Completions:
        """Generate a completion of each prompt; return tokens and their log-probabilities.

        Args:
            wrapped: the policy as the trainer wraps it.
            config: generation config.
            overrides: options that replace the defaults of the model.
            prompt_ids: tokens of each prompt; equal prompts are computed once.
            fields: outputs of the processor beside the tokens.
        """
        accelerator, checkpointing = self.run.accelerator, self.run.args.gradient_checkpointing_kwargs
        options: Any = {"gradient_checkpointing_kwargs": checkpointing, "generation_kwargs": overrides}
        unwrapped = unwrap_model_for_generation(wrapped, accelerator, **options)
        with unwrapped as model, torch.no_grad(), evaluating(model):
            causal: Any = causal_model(model)
            config = causal._prepare_generation_config(config)[0]
            with accelerator.autocast():
                requests = make_requests(causal, prompt_ids, fields)
            pages = self._plan_pages(causal, requests, config.max_new_tokens)
            with looking_up(causal, requests, accelerator.autocast):
                return generate_batch(causal, requests, config, pages)

    def compare(self, batch: Batch, logps: Tensor, scored: Tensor) -> dict[str, float]:
        """Compare returned log-probabilities with the trainer's; return the metrics that TRL logs for vLLM.

        Args:
            batch: rows of a rollout.
            logps: (N, T), the trainer's.
            scored: (N, T) bool, tokens that it scored.
        """
        distance = (logps.detach() - batch.columns["engine_logps"]).abs()[scored & batch.valid]
        statistics = [distance.sum(), distance.new_tensor(len(distance)), nn.functional.pad(distance, (0, 1)).max()]
        sums = self.run.accelerator.gather(torch.stack(statistics).unsqueeze(0)).double()
        mean, largest = (sums[:, 0].sum() / sums[:, 1].sum().clamp(min=1)).item(), sums[:, 2].max().item()
        if self.is_exact is None and sums[:, 1].any():
            self.is_exact = largest <= EXACT
        name = "sampling/sampling_logp_difference"
        return {f"{name}/mean": mean, f"{name}/max": largest}

    def old_logps(self, rollout: Rollout, mask: Tensor) -> Tensor | None:
        """Return log-probabilities of generation as old ones, (N, T), or None if the trainer's differ.

        Args:
            rollout: its `engine_logps` are moved out.
            mask: (N, T) bool, valid tokens.
        """
        if not self.is_exact or rollout.engine_logps is None:
            return None
        sampled, rollout.engine_logps = rollout.engine_logps, None  # they are not compared with themselves
        rows = [nn.functional.pad(torch.tensor(row), (0, mask.size(1) - len(row))) for row in sampled]
        return torch.stack(rows).to(mask.device)

    def _plan_pages(self, causal: Any, requests: Requests, new_tokens: int) -> Any:
        """Return options with pages for all requests, or for as many as `batching_cache_megabytes` allows."""
        from transformers.generation.continuous_batching.cache import find_head_dim, find_num_key_value_heads

        options, text = self.pages, causal.config.get_text_config()
        size, width = options.page_size, 2 * find_num_key_value_heads(text) * find_head_dim(text)
        page = size * width * text.num_hidden_layers * causal.dtype.itemsize  # bytes, of all layers
        groups = [(len(ids), len(rows)) for ids, rows in zip(requests.ids, requests.rows, strict=True)]
        needed = sum(tokens // size + count * -(-(tokens % size + new_tokens) // size) for tokens, count in groups)
        most = (self.run.args.batching_cache_megabytes or math.inf) * 2**20 / page
        blocks = options.num_blocks or max(int(min(needed / _FREE + 1, most)), 1)
        tokens, completions = map(sum, zip(*groups, strict=True))
        if not self._told and self.run.accelerator.is_main_process:
            logger.warning(f"Continuous batching: {blocks * page >> 20} MB of pages for {completions} completions.")
        self._told = True
        tokens = options.max_batch_tokens or min(max(tokens, completions), _TOKENS_PER_PASS)
        return replace(options, num_blocks=blocks, max_batch_tokens=tokens, return_logprobs=True)


def generate_batch(causal: Any, requests: Requests, config: Any, pages: Any) -> Completions:
    """Generate the completions of requests; return their tokens and log-probabilities by row.

    All requests wait before the first pass, so that its order, and with it sampling, depends on the seed alone.

    Args:
        causal: transformers model, which looks up the requests.
        requests: prompts.
        config: options of generation.
        pages: options of continuous batching.

    Raises:
        BatchingError: a pass failed.
    """
    from transformers.generation.continuous_batching.utils import WorkloadHints

    parts = ((name, place, row) for name, rows in enumerate(requests.rows) for place, row in enumerate(rows))
    missing = {f"{name}__child#{place - 1}" if place else str(name): row for name, place, row in parts}
    hints = WorkloadHints(max(map(len, requests.ids)), config.max_new_tokens, len(missing))
    manager = causal.init_continuous_batching(config, pages, hints)
    for name, (ids, rows) in enumerate(zip(requests.ids, requests.rows, strict=True)):
        manager.num_return_sequences = len(rows)
        if rows:
            manager.add_request(ids, request_id=str(name), eos_token_id=config.eos_token_id)
    completions: list[Any] = [None] * len(missing)
    if torch.accelerator.is_available():  # weights and features are ready for the stream of another thread
        torch.accelerator.synchronize()
    manager.warmup()
    manager.start()
    try:
        while missing:
            result = manager.get_result(timeout=1)
            if result.error if result else not manager.is_running():
                cause = manager.background_thread_status.fatal_error or (result and result.error)
                cure = "give batching_cache_megabytes, for more pages or fewer, or use generate"
                raise BatchingError(f"Continuous batching failed ({cause}): {cure}.")
            if result is not None:
                completions[missing.pop(result.request_id)] = result
    finally:
        manager.stop(hard_stop=bool(missing))
        manager.destroy()
    return [result.generated_tokens for result in completions], [result.logprobs for result in completions]
