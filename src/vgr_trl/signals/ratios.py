"""Vision and instruction masks; attention ratios VGR, AEI and MDI balance; dependency on the image.

Averages come first, ratios after: a segment's attention is the mean over its layers and over the valid tokens.
Undefined values (no vision tokens, no instruction tokens, no completion tokens, no attention on either) are NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgr_trl.errors import ConfigError
from vgr_trl.metrics.step_metrics import k3
from vgr_trl.pixels import on_device

_ID_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass
class AttentionMass:
    """Attention of the emitting queries on the prompt's vision and instruction tokens, summed over keys.

    Attributes:
        vision: (L, N, T) float32 in [0, 1], mean over heads of the attention on all vision tokens together.
        instruction: (L, N, T) float32 in [0, 1], the same on all instruction tokens.
        num_vision: (N,) int, vision tokens of each row's prompt.
        num_instruction: (N,) int, instruction tokens of each row's prompt.
        mask: (N, T) bool, completion tokens that count in the loss.
        region: (L, N, T) float32, the same on the vision tokens of the question's boxes; None: not measured.
        num_region: (N,) int, vision tokens of the boxes; None: not measured.
        seen_vision: (N, T) int, vision tokens before each token, where tools return images; None: `num_vision` for all.
        seen_instruction: (N, T) int, instruction tokens before each token; None: `num_instruction` for all.
    """

    vision: Tensor
    instruction: Tensor
    num_vision: Tensor
    num_instruction: Tensor
    mask: Tensor
    region: Tensor | None = None
    num_region: Tensor | None = None
    seen_vision: Tensor | None = None
    seen_instruction: Tensor | None = None

    def seen(self) -> tuple[Tensor, Tensor]:
        """Return |V| and |I| per token, (N, T), or per prompt, (N, 1)."""
        if self.seen_vision is None or self.seen_instruction is None:
            return self.num_vision.unsqueeze(1), self.num_instruction.unsqueeze(1)
        return self.seen_vision, self.seen_instruction


def join_masses(parts: Sequence[AttentionMass]) -> AttentionMass:
    """Concatenate the rows of attention masses with the same measurements."""
    names = [name for name, value in vars(parts[0]).items() if value is not None]
    columns = {name: [vars(part)[name] for part in parts] for name in names}
    layered = ("vision", "instruction", "region")  # (L, N, T)
    return AttentionMass(**{name: torch.cat(values, dim=int(name in layered)) for name, values in columns.items()})


@dataclass
class ModalityMasks:
    """Masks of tokens, bool with the shape of the tokens, (N, P) or (N, S).

    Attributes:
        vision: placeholder tokens of images and videos.
        instruction: tokens other than vision, padding and special tokens.
        region: vision tokens of the question's boxes; None: not wanted.
        images: vision tokens of each image of a row, with one more dimension; None: not wanted.
    """

    vision: Tensor
    instruction: Tensor
    region: Tensor | None = None
    images: Tensor | None = None


def build_modality_masks(
    input_ids: Tensor, attention_mask: Tensor, *, vision_token_ids: Sequence[int], special_token_ids: Sequence[int]
) -> ModalityMasks:
    """Build the masks of vision and instruction tokens.

    Args:
        input_ids: (N, P) tokens of prompts.
        attention_mask: (N, P), 0 for padding.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens outside both masks: chat-template markers, vision start and end, bos, eos.
    """
    present = attention_mask.bool()
    vision, special = (
        torch.isin(input_ids, on_device(list(ids), input_ids.device).to(input_ids.dtype))
        for ids in (vision_token_ids, special_token_ids)
    )
    vision &= present
    return ModalityMasks(vision, present & ~vision & ~special)


def vision_token_ids(model: Any, processor: Any = None) -> tuple[int, ...]:
    """Collect the placeholder ids of images and videos from the model's configuration and the processor.

    Args:
        model: transformers model, or its configuration; None: only the processor is read.
        processor: the model's processor; None: only the configuration is read.
    """
    sources = getattr(model, "config", model), processor
    ids = {getattr(source, name, None) for source in sources for name in _ID_NAMES}
    for token in (getattr(processor, name, None) for name in ("image_token", "video_token")):
        if isinstance(token, str):
            tokenizer = tokenizer_of(processor)
            ids |= {tokenizer.convert_tokens_to_ids(token)} - {tokenizer.unk_token_id}
    return tuple(sorted(token for token in ids if isinstance(token, int) and not isinstance(token, bool)))


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor, or the tokenizer that stands in its place."""
    return getattr(processor, "tokenizer", processor)


def special_token_ids(processor: Any) -> tuple[int, ...]:
    """Return the ids of all tokens that a processor or tokenizer declares special, or that were added as special."""
    tokenizer = tokenizer_of(processor)
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(sorted({*tokenizer.all_special_ids, *added}))


def split_layers(num_layers: int, scheme: str = "thirds") -> dict[str, list[int]]:
    """Return the layers of the segments `early`, `middle`, `late` and `all`; only `all` for fewer than 3 layers.

    Args:
        num_layers: L, at least 1.
        scheme: `thirds`, contiguous parts whose sizes differ by at most one, extra layers going to the earlier parts;
            or `ends`, the first two, the middle two and the last two layers.

    Raises:
        ConfigError: there is no such scheme.
    """
    if scheme not in ("thirds", "ends"):
        raise ConfigError(f"scheme is {scheme!r}: give thirds or ends.")
    layers = list(range(num_layers))
    if num_layers < 3:
        return {"all": layers}
    start = (num_layers - 2) // 2
    ends = layers[:2], layers[start : start + 2], layers[-2:]
    parts = ends if scheme == "ends" else [part.tolist() for part in np.array_split(layers, 3)]
    return dict(zip(("early", "middle", "late", "all"), (*parts, layers), strict=True))


def late_layers(num_layers: int, scheme: str = "thirds") -> list[int]:
    """Return the layers that rewards and credit read: the segment `late` of `split_layers`, or all layers."""
    segments = split_layers(num_layers, scheme)
    return segments.get("late", segments["all"])


def last_layers(num_layers: int, count: int | None, scheme: str, name: str) -> list[int]:
    """Return the last `count` layers; for None, the late layers.

    Args:
        num_layers: L, at least 1.
        count: number of layers, in [1, L], or None.
        scheme: split into segments, see `split_layers`.
        name: the option that gives `count`, for the message.

    Raises:
        ConfigError: `count` is out of range.
    """
    if count is None:
        return late_layers(num_layers, scheme)
    if not 1 <= count <= num_layers:
        raise ConfigError(f"{name} is {count}: give a number in [1, {num_layers}], or None for the late segment.")
    return list(range(num_layers - count, num_layers))


def mean_attention(mass: AttentionMass, layers: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return A_V and A_I of each completion, (N,) each in [0, 1]: means over the layers and over the valid tokens.

    A completion without valid tokens gets NaN.
    """
    mask = mass.mask.bool()
    return _token_mean(_layer_mean(mass.vision, layers), mask), _token_mean(_layer_mean(mass.instruction, layers), mask)


def vision_gain_ratio(mass: AttentionMass, layers: Sequence[int] | None = None) -> Tensor:
    """Return VGR = (A_I / |I|) / (A_V / |V|) of each completion; the smaller, the more attention on the image.

    Args:
        mass: attention mass (L, N, T).
        layers: the segment; None: all layers.

    Returns:
        (N,) float32 in [0, inf]; inf for attention on the instruction alone, NaN where undefined.
    """
    return _ratio(*_averages(mass, layers))


def token_vision_gain_ratio(mass: AttentionMass, layers: Sequence[int] | None = None) -> Tensor:
    """Return the `vision_gain_ratio` of each token, (N, T) float32; NaN also for tokens that do not count."""
    vision, instruction = (_layer_mean(side, layers) for side in (mass.vision, mass.instruction))
    return _ratio(vision, instruction, *mass.seen()).masked_fill(~mass.mask.bool(), math.nan)


def attention_efficiency_index(mass: AttentionMass, layers: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return the AEI for vision and for instruction, (N,) each: share of attention over share of tokens.

    AEI_x = (A_x / (A_V + A_I)) / (|x| / (|V| + |I|)); 1 means attention in proportion to the number of tokens.
    """
    vision, instruction, num_vision, num_instruction = _averages(mass, layers)
    attention, tokens = vision + instruction, num_vision + num_instruction
    undefined = (num_vision == 0) | (num_instruction == 0)
    first, second = vision / attention / (num_vision / tokens), instruction / attention / (num_instruction / tokens)
    return first.masked_fill(undefined, math.nan), second.masked_fill(undefined, math.nan)


def mdi_balance(vgr: Tensor, ratio: float = 2.0) -> Tensor:
    """Return the MDI balance, clip(1 - |ln VGR| / ln R, 0, 1): 1 at VGR 1, 0 for VGR ≤ 1 / R or ≥ R; NaN stays.

    Args:
        vgr: any shape.
        ratio: R, above 1.

    Raises:
        ConfigError: `ratio` is not above 1.
    """
    if not (math.isfinite(ratio) and ratio > 1):
        raise ConfigError(f"mdi_balance_ratio is {ratio}: give a number above 1.")
    return (1 - vgr.log().abs() / math.log(ratio)).clamp(0, 1)


def _layer_mean(side: Tensor, layers: Sequence[int] | None) -> Tensor:
    return (side if layers is None else torch.stack([side[layer] for layer in layers])).mean(0)  # (N, T)


def _token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row over the valid tokens, (N,); NaN without valid tokens."""
    return values.masked_fill(~mask, 0).sum(1) / mask.sum(1)


def _averages(mass: AttentionMass, layers: Sequence[int] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A_V, A_I, |V| and |I| of each completion, (N,) each.

    If tokens see different numbers of keys, A is the mean attention per key times the mean number of keys.
    """
    if mass.seen_vision is None or mass.seen_instruction is None:
        return (*mean_attention(mass, layers), mass.num_vision, mass.num_instruction)
    mask = mass.mask.bool() & (mass.seen_vision > 0) & (mass.seen_instruction > 0)  # (N, T)
    numbers = [_token_mean(seen, mask) for seen in mass.seen()]
    sides = zip((mass.vision, mass.instruction), mass.seen(), numbers, strict=True)
    vision, instruction = (_token_mean(_layer_mean(side, layers) / seen, mask) * count for side, seen, count in sides)
    return vision, instruction, numbers[0], numbers[1]


def _ratio(vision: Tensor, instruction: Tensor, num_vision: Tensor, num_instruction: Tensor) -> Tensor:
    ratio = (instruction / num_instruction) / (vision / num_vision)
    return ratio.masked_fill((num_vision == 0) | (num_instruction == 0), math.nan)


def measure_segments(mass: AttentionMass, scheme: str, mdi_balance_ratio: float) -> dict[str, Tensor]:
    """Return the six `ATTENTION_QUANTITIES` per segment of layers, (N, 6); NaN where undefined.

    Args:
        mass: attention mass (L, N, T).
        scheme: split into segments, see `split_layers`.
        mdi_balance_ratio: R of `mdi_balance`.
    """
    segments = {}
    for name, layers in split_layers(len(mass.vision), scheme).items():
        vgr = vision_gain_ratio(mass, layers)  # (N,)
        vision, instruction = attention_efficiency_index(mass, layers)  # (N,), (N,)
        balance = mdi_balance(vgr, mdi_balance_ratio)
        segments[name] = torch.stack([vgr, vision, instruction, balance, *mean_attention(mass, layers)], dim=1)
    return segments


def visual_dependency(logps: Tensor, perturbed_logps: Tensor) -> Tensor:
    """Return the visual dependency of each token, in [0, 10]; 0 if the image makes no difference.

    With d = clamp(perturbed log-probability - original log-probability, -20, 20) it is clamp(e^d - d - 1, 0, 10), an
    estimate of the KL divergence between the two distributions (VPPO, https://huggingface.co/papers/2510.09285).

    Args:
        logps: (N, T), log-probabilities of the tokens given the image.
        perturbed_logps: (N, T), the same given the perturbed image, under the same policy.

    Returns:
        (N, T) float32. NaN (undefined) if one argument is NaN, or both are the same infinity. Gradients flow into both
        arguments, except where the value is clamped.
    """
    difference = (perturbed_logps.float() - logps.float()).clamp(-20, 20)  # (N, T)
    return k3(difference).clamp(0, 10)


def entropies_of(logps: Tensor) -> Tensor:
    """Return entropies (C,) from log-probabilities (C, vocabulary), which it changes in place."""
    probabilities = logps.exp()
    # A forbidden token has the logit -inf and adds nothing.
    sums: Tensor = torch.linalg.vecdot(probabilities, logps.clamp_(min=torch.finfo(logps.dtype).min))
    return -sums


def bounded(logps: Tensor) -> Tensor:
    """Replace -inf by the lowest finite number, so that forbidden tokens add 0 to a sum."""
    return logps.clamp(min=torch.finfo(logps.dtype).min)


def jensen_shannon(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence, in [0, ln 2]: the KL of two distributions to their mean, averaged.

    Args:
        logits: (..., vocabulary), logits of one distribution.
        other_logits: (..., vocabulary), logits of the other distribution.

    Returns:
        (...) float32, in nats.
    """
    log_p, log_q = (bounded(torch.log_softmax(side.float(), -1)) for side in (logits, other_logits))
    mean = torch.logaddexp(log_p, log_q) - math.log(2)
    halves = [(side.exp() * (side - mean)).sum(-1) for side in (log_p, log_q)]
    return ((halves[0] + halves[1]) / 2).clamp(0, math.log(2))
