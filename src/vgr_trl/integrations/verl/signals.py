"""Measure attention in passes of verl and EasyR1 or from matrices of `generate`, and perturb images."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vgr_trl.credit import token_weights
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.integrations.verl.credit import SignalOptions
from vgr_trl.options import changed_options
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.signals.probe import AttentionProbe
from vgr_trl.signals.ratios import (
    AttentionMass,
    build_modality_masks,
    last_layers,
    late_layers,
    special_token_ids,
    token_vision_gain_ratio,
    tokenizer_of,
    vision_gain_ratio,
    vision_token_ids,
)

LAST_LAYERS_OPTION = "token_weight_last_k_layers"  # for messages
_SIDE = 14  # side of a square, in pixels
Context = dict[str, Any]  # as `build_actor_context` returns it


def build_token_vgr_weights_for_batch(
    outputs_attentions: Sequence[Sequence[Tensor | None]],
    input_ids: Tensor,
    sequences: Tensor,
    processor: Any,
    image_grid_thw: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """Return token weights from the attention matrices of `generate(output_attentions=True)`.

    Args:
        outputs_attentions: `attentions` of the output of generate: per step and layer (N, H, Q, K).
        input_ids: (N, P) prompts, left-padded with the tokenizer's padding token; one row may stand for several
            consecutive sequences.
        sequences: (N, P + T), `sequences` of the output of generate.
        processor: processor of the model; defines image tokens and special tokens.
        image_grid_thw: (images, 3), patches in time, height and width, to check the number of image tokens; None: no
            check.
        options: options of `token_vgr_weights`.

    Returns:
        (N, T) float32, and the `info` of `token_vgr_weights`.

    Raises:
        DataError: the arguments are not of one generation, or the number of image tokens differs from the grid.
        ConfigError: an option is out of range, or the processor has no image token.
    """
    count, length = sequences.size(0), sequences.size(1) - input_ids.size(1)
    if count % len(input_ids) or length < 1 or len(outputs_attentions) < length:
        shapes = f"input_ids {tuple(input_ids.shape)}, sequences {tuple(sequences.shape)}"
        raise DataError(f"{shapes} and attentions of {len(outputs_attentions)} steps: give those of one generation.")
    tokenizer = tokenizer_of(processor)
    vision = vision_token_ids(None, processor)
    if not vision:
        raise ConfigError(f"{type(processor).__name__} has no image token: give the processor of the model.")
    if image_grid_thw is not None:
        merged = getattr(getattr(processor, "image_processor", None), "merge_size", 2) ** 2
        expected = int(torch.as_tensor(image_grid_thw).prod(-1).sum()) // merged
        count_of_images = int(torch.isin(input_ids, torch.tensor(vision, device=input_ids.device)).sum())
        if count_of_images != expected:
            raise DataError(f"The prompts have {count_of_images} image tokens, but image_grid_thw implies {expected}.")
    special = special_token_ids(processor)  # among them the padding token
    masks = build_modality_masks(
        input_ids, torch.ones_like(input_ids), vision_token_ids=vision, special_token_ids=special
    )
    sets = torch.stack([masks.vision, masks.instruction], dim=-1).repeat_interleave(count // len(input_ids), dim=0)
    tokens = sequences[:, -length:]
    ends = tokens == tokenizer.eos_token_id
    before_end = ends.cumsum(1) - ends.long() == 0  # up to and including the first end of sequence
    mask = before_end & ((tokens != tokenizer.pad_token_id) | ends)
    return token_vgr_weights(_mass_of_steps(outputs_attentions[:length], sets, mask), **options)


def _mass_of_steps(steps: Sequence[Sequence[Tensor | None]], sets: Tensor, mask: Tensor) -> AttentionMass:
    """Return the mass of the emitting queries, the last query of each step.

    Args:
        steps: per new token and layer, (N, H, Q, K) weights; step 0 comes after the P tokens of the prompt.
        sets: (N, P, 2), vision and instruction.
        mask: (N, T) bool, tokens that count.
    """

    def attended(step: int, weights: Tensor) -> Tensor:
        mean = weights[:, :, -1].mean(1, dtype=torch.float32)  # (N, K)
        first = sets.size(1) + step - mean.size(1)  # a cache with a window has dropped the keys before
        if first < 0:
            raise ConfigError("Attention cannot be measured with a cache of fixed length: use a dynamic one.")
        keys = sets[:, first:].to(mean)  # (N, K', 2)
        return torch.einsum("nk,nkc->nc", mean[:, : keys.size(1)], keys)

    of_tokens = [
        torch.stack([attended(step, weights) for weights in layers if weights is not None])  # (L, N, 2)
        for step, layers in enumerate(steps)
    ]
    mass = torch.stack(of_tokens, dim=2)  # (L, N, T, 2)
    counts = sets.sum(1)
    return AttentionMass(mass[..., 0], mass[..., 1], counts[:, 0], counts[:, 1], mask)


def token_vgr_weights(
    mass: AttentionMass, *, last_k_layers: int | None = None, **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return token weights of N completions from the measurement of a probe, without attention matrices.

    Args:
        mass: measurement of `AttentionProbe`, `RolloutScorer` or `GenerationProbe`; its `mask` marks valid tokens.
        last_k_layers: number of last layers to use; None: the late third.
        options: `clip`, `smooth_sigma` and `topk_ratio`, as `vgr_trl.credit.token_weights` takes them.

    Returns:
        (N, T) float32 with mean 1 over the valid tokens of each completion; and `info`: `vgr` (N,) of the same layers,
        `undefined_fraction` of the valid tokens, `num_vision` and `num_instruction` (N,), `layers`.

    Raises:
        ConfigError: an option is out of range.
    """
    layers = last_layers(len(mass.vision), last_k_layers, "thirds", LAST_LAYERS_OPTION)
    token_vgr, mask = token_vision_gain_ratio(mass, layers), mass.mask.bool()  # (N, T)
    weights = token_weights(token_vgr, mask, **options)
    info = {
        "vgr": vision_gain_ratio(mass, layers),
        "undefined_fraction": float((token_vgr.isnan() & mask).sum() / mask.sum().clamp(min=1)),
        "num_vision": mass.num_vision,
        "num_instruction": mass.num_instruction,
        "layers": layers,
    }
    return weights, info


@contextmanager
def measure_pass(
    model: Any, input_ids: Tensor, present: Tensor, prompt: Tensor, context: Context, packed: bool, pad: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Measure the attention of the forward pass over N sequences in this block.

    Yields columns, filled at the end of the block, with one value for each token, sequence by sequence and without
    padding: attention per vision token (`vgr_vision`) and per instruction token (`vgr_instruction`) of the own prompt
    in the late layers, and with token weights their ratio in the layers of these (`vgr_token`). A value belongs to the
    token that its position predicts, the next one.

    Args:
        model: model of the actor, may be wrapped by FSDP.
        input_ids: (N, S), tokens.
        present: (N, S), False for padding.
        prompt: (N, S), True for prompt tokens.
        context: return value of `build_actor_context`.
        packed: whether the pass concatenates the sequences in one row, without their padding.
        pad: number of padding tokens that it then appends.

    Raises:
        ConfigError: the image tokens are unknown.
    """
    causal, options = causal_model(model), SignalOptions.read(context["options"])
    vision = tuple(options.vision_token_ids or ()) or vision_token_ids(causal)
    if not vision:
        raise ConfigError(f"{type(causal).__name__} has no image token in its configuration: give vision_token_ids.")
    present, prompt = present.bool(), prompt.bool() & present.bool()
    rows = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1).expand_as(input_ids)  # each token's row
    if packed:
        parts = (input_ids, prompt, rows, present)
        input_ids, prompt, rows, present = (functional.pad(part[present], (0, pad))[None] for part in parts)
    special, columns = context["special_token_ids"], dict[str, Tensor]()
    masks = build_modality_masks(input_ids, prompt, vision_token_ids=vision, special_token_ids=special)
    places = (present & ~prompt).any(0).nonzero().flatten().tolist() or [1]  # response columns
    emitting = slice(max(places[0] - 1, 0), max(places[-1], 1))
    with AttentionProbe(model, masks, emitting, packed=packed) as probe:
        yield columns
    margins = emitting.start, input_ids.size(1) - emitting.stop

    def per_token(mask: Tensor, mass: Tensor) -> Tensor:
        counts = torch.zeros(int(rows.max()) + 1, device=mask.device)
        of_token = counts.index_add(0, rows.flatten(), mask.flatten().float())[rows[:, emitting]]
        mean = mass / of_token.masked_fill(of_token == 0, torch.nan)  # (L, rows, emitting)
        return functional.pad(mean, margins, value=torch.nan)[:, present]  # (L, tokens)

    mass = probe.mass
    to_vision, to_instruction = per_token(masks.vision, mass.vision), per_token(masks.instruction, mass.instruction)
    count = len(mass.vision)
    late = late_layers(count, options.attention_segments)
    columns |= {"vgr_vision": to_vision[late].mean(0), "vgr_instruction": to_instruction[late].mean(0)}
    if options.token_weights:
        last_k, scheme = options.token_weights_last_k_layers, options.attention_segments
        layers = last_layers(count, last_k, scheme, LAST_LAYERS_OPTION)
        columns["vgr_token"] = to_instruction[layers].mean(0) / to_vision[layers].mean(0)


def perturb_row(inputs: Mapping[str, Any], options: SignalOptions, step: int, black: Sequence[float]) -> dict[str, Any]:
    """Return the pixel inputs of a row with squares blackened, each with probability `black_prob`.

    The squares are the patches, or have a side of 14 pixels. The seed depends on run, step and pixels, so that
    completions of one prompt get the same squares on every process.

    Args:
        inputs: inputs of one row; `pixel_values` is (patches, C x time x p x p), channels first, or (..., C, H, W).
        step: optimizer step.
        black: normalised value of black per channel.
    """
    pixels = inputs.get("pixel_values")
    if pixels is None:
        return dict(inputs)
    content = zlib.crc32(pixels.detach().cpu().float().contiguous().numpy().tobytes())
    generator = np.random.default_rng([options.seed, step, content])
    colours = torch.tensor(black, dtype=pixels.dtype, device=pixels.device)  # (C,)
    if pixels.ndim == 2:
        grid, colours = (len(pixels), 1), colours.repeat_interleave(pixels.size(1) // len(black))
    else:
        *front, _, height, width = pixels.shape
        grid, colours = (*front, 1, -(-height // _SIDE), -(-width // _SIDE)), colours.view(-1, 1, 1)
    dark = torch.from_numpy(generator.random(grid) < options.black_prob).to(pixels.device)
    if pixels.ndim > 2:
        dark = dark.repeat_interleave(_SIDE, -2).repeat_interleave(_SIDE, -1)[..., :height, :width]
    return {**inputs, "pixel_values": torch.where(dark, colours, pixels)}


def perturb_rows(micro_batch: Any, context: Context) -> tuple[list[dict[str, Any]], Tensor]:
    """Return the perturbed pixel inputs of each row, and which rows have no image, (N,) bool.

    Args:
        micro_batch: micro-batch with `input_ids` and, if there are images, `multi_modal_inputs`.
        context: return value of `build_actor_context`.
    """
    options, ids = SignalOptions.read(context["options"]), micro_batch["input_ids"]
    inputs = micro_batch.get("multi_modal_inputs", None)
    rows = [dict(getattr(row, "data", row) or {}) for row in ([None] * ids.size(0) if inputs is None else inputs)]
    perturbed = [perturb_row(row, options, context["step"], context["black"]) for row in rows]
    return perturbed, torch.tensor([row.get("pixel_values") is None for row in rows], device=ids.device)


def build_actor_context(options: SignalOptions, step: int, processor: Any) -> Context:
    """Return the context that the actor gets with a batch: options, and constants of the processor.

    Args:
        options: options of the run.
        step: optimizer step.
        processor: processor of the model, or its tokenizer.
    """
    return {
        "options": changed_options(options),
        "step": step,
        "special_token_ids": list(special_token_ids(processor)),
        "black": normalised_black(processor),
    }


def normalised_black(processor: Any) -> list[float]:
    """Return the value of black per channel after the processor's normalisation."""
    settings = processor.image_processor.to_dict() if "image_processor" in vars(processor) else {}
    if not (settings.get("image_mean") and settings.get("image_std") and settings.get("do_normalize", True)):
        return [0.0, 0.0, 0.0]
    return [-middle / spread for middle, spread in zip(settings["image_mean"], settings["image_std"], strict=True)]
