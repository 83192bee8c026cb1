"""Weights of the tokens of a batch from their VGR, and what a trainer does with them."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from vgr_trl.batch.signals import AttentionMass
from vgr_trl.credit.token_weights import token_weights
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.signals.attention.generated import mass_of_steps
from vgr_trl.signals.modality import build_modality_masks, special_token_ids, vision_token_ids
from vgr_trl.signals.ratios import last_layers, token_vision_gain_ratio, vision_gain_ratio

LAST_LAYERS = "token_weight_last_k_layers"  # the option, as the notes name it
_FITTED = "token_weights were padded with 1 or cut to the {} tokens of the responses (this is said once)."


def build_token_vgr_weights_for_batch(
    outputs_attentions: Sequence[Sequence[torch.Tensor | None]],
    input_ids: torch.Tensor,
    sequences: torch.Tensor,
    processor: Any,
    image_grid_thw: torch.Tensor | None = None,
    *,
    clip: tuple[float, float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    last_k_layers: int | None = None,
    topk_ratio: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the weights of generated tokens, from the matrices of `generate(output_attentions=True)`.

    Args:
        outputs_attentions: `attentions` of what generate returns: per step and layer (N, H, Q, K).
        input_ids: (N, P) prompts, padded on the left with the tokenizer's padding token; one row may stand for several
            consecutive sequences.
        sequences: (N, P + T), `sequences` of what generate returns.
        processor: of the model; says which tokens are the image, which are special.
        image_grid_thw: (images, 3), patches of the images in time, height and width, by which the image tokens of the
            prompts are checked. None: they are not.
        clip, smooth_sigma, topk_ratio: as `vgr_trl.credit.token_weights`.
        last_k_layers: the last so many layers; None: the late third.

    Returns:
        (N, T) float32, and the `info` of `token_vgr_weights`.

    Raises:
        DataError: the arguments are not of one generation, or the prompts have other image tokens than the grid says.
        ConfigError: an option is out of range, or the processor has no image token.
    """
    count, length = sequences.size(0), sequences.size(1) - input_ids.size(1)
    if count % len(input_ids) or length < 1 or len(outputs_attentions) < length:
        raise DataError(
            f"input_ids {tuple(input_ids.shape)}, sequences {tuple(sequences.shape)} and attentions of "
            f"{len(outputs_attentions)} steps: give the prompts and what generate made of them."
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    vision = vision_token_ids(None, processor)
    if not vision:
        raise ConfigError(f"{type(processor).__name__} has no image token: give the processor of the model.")
    _check_grid(input_ids, vision, processor, image_grid_thw)
    present = (input_ids != tokenizer.pad_token_id).cumsum(1) > 0  # (N, P): padding stands in front
    masks = build_modality_masks(
        input_ids, present, vision_token_ids=vision, special_token_ids=special_token_ids(processor)
    )
    sets = torch.stack([masks.vision, masks.instruction], dim=-1)  # (N, P, 2)
    mass = mass_of_steps(outputs_attentions[:length], sets.repeat_interleave(count // len(input_ids), dim=0))
    mass.mask = _valid(sequences[:, -length:], tokenizer)
    return token_vgr_weights(
        mass, clip=clip, smooth_sigma=smooth_sigma, last_k_layers=last_k_layers, topk_ratio=topk_ratio
    )


def token_vgr_weights(
    mass: AttentionMass,
    *,
    clip: tuple[float, float] | None = (0.2, 3.0),
    smooth_sigma: float = 0.0,
    last_k_layers: int | None = None,
    topk_ratio: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the weights of the tokens of N completions from what a probe has measured: no matrix is needed.

    Args:
        mass: of `AttentionProbe`, `RolloutScorer` or `GenerationProbe`; its `mask` says which tokens are valid.
        clip, smooth_sigma, topk_ratio: as `vgr_trl.credit.token_weights`.
        last_k_layers: the last so many layers; None: the late third.

    Returns:
        (N, T) float32 with mean 1 over the valid tokens of each completion; and `info`: `vgr` (N,) of the same layers,
        `undefined_fraction` of the valid tokens, `num_vision` and `num_instruction` (N,), `layers`.

    Raises:
        ConfigError: an option is out of range.
    """
    layers = last_layers(len(mass.vision), last_k_layers, "thirds", LAST_LAYERS)
    token_vgr, mask = token_vision_gain_ratio(mass, layers), mass.mask.bool()  # (N, T)
    weights = token_weights(token_vgr, mask, clip=clip, smooth_sigma=smooth_sigma, topk_ratio=topk_ratio)
    info = {
        "vgr": vision_gain_ratio(mass, layers),
        "undefined_fraction": float((token_vgr.isnan() & mask).sum() / mask.sum().clamp(min=1)),
        "num_vision": mass.num_vision,
        "num_instruction": mass.num_instruction,
        "layers": layers,
    }
    return weights, info


def as_weights(values: Any, response_mask: torch.Tensor) -> torch.Tensor:
    """Return `token_weights` of a reward or rollout as a tensor of the responses' shape, padded with 1 or cut.

    Args:
        values: tensor (N, T'), or per completion a list or tensor of weights; None for a completion without any.
        response_mask: (N, T).

    Raises:
        DataError: there is not one row per completion, or a weight of a valid token is negative or not finite.
    """
    count, length = response_mask.shape
    rows = [torch.ones(0) if row is None else torch.as_tensor(row, dtype=torch.float32).flatten() for row in values]
    if len(rows) != count:
        raise DataError(f"token_weights has {len(rows)} rows for {count} responses: give one for each.")
    weights = torch.ones(count, length)
    for row, given in zip(weights, rows, strict=True):
        row[: len(given)] = given[:length]
    valid = response_mask.bool().cpu()
    if any(len(row) > length or len(row) < int(mask.sum()) for row, mask in zip(rows, valid, strict=True)):
        warnings.warn(_FITTED.format(length), stacklevel=2)
    if not bool((weights[valid].isfinite() & (weights[valid] >= 0)).all()):
        raise DataError("token_weights of a valid token is negative or not finite: give numbers of at least 0.")
    return weights.to(response_mask.device)


def _valid(tokens: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Which generated tokens (N, T) count: up to the first end of sequence, which counts itself."""
    ended = (tokens == tokenizer.eos_token_id).long()
    padding = (tokens == tokenizer.pad_token_id) & (tokens != tokenizer.eos_token_id)
    valid: torch.Tensor = (ended.cumsum(1) - ended == 0) & ~padding
    return valid


def _check_grid(
    input_ids: torch.Tensor, vision: Sequence[int], processor: Any, image_grid_thw: torch.Tensor | None
) -> None:
    if image_grid_thw is None:
        return
    merged = getattr(getattr(processor, "image_processor", None), "merge_size", 2) ** 2
    expected = int(torch.as_tensor(image_grid_thw).prod(-1).sum()) // merged
    found = int(torch.isin(input_ids, torch.tensor(vision, device=input_ids.device)).sum())
    if found != expected:
        raise DataError(
            f"The prompts have {found} image tokens, but image_grid_thw makes {expected}: give the grid of the images "
            "of these prompts, once per row."
        )
