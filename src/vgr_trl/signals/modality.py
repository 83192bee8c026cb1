"""Which tokens of a prompt are the image, which the instruction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vgr_trl.errors import ConfigError, DataError

_ID_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass
class ModalityMasks:
    """Attributes, all bool with the shape of the tokens they were made of, (N, P) or (N, S):

    vision: placeholder tokens of images and videos.
    instruction: tokens that are neither vision, nor padding, nor special.
    region: vision tokens of what the question is about; None: not asked for.
    """

    vision: torch.Tensor
    instruction: torch.Tensor
    region: torch.Tensor | None = None


def build_modality_masks(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    vision_token_ids: Sequence[int],
    special_token_ids: Sequence[int],
) -> ModalityMasks:
    """Return which tokens are vision and which are instruction.

    Args:
        input_ids: (N, P) tokens of prompts.
        attention_mask: (N, P), 0 for padding.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to neither: chat-template markers, vision start and end, bos, eos.

    Raises:
        DataError: the shapes differ.
    """
    if input_ids.shape != attention_mask.shape:
        raise DataError(
            f"input_ids has the shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}: give "
            "both for the same tokens."
        )
    present = attention_mask.bool()
    vision = _is_one_of(input_ids, vision_token_ids) & present
    special = _is_one_of(input_ids, special_token_ids)
    return ModalityMasks(vision, present & ~vision & ~special)


def _is_one_of(input_ids: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    return torch.isin(input_ids, torch.tensor(list(ids), device=input_ids.device, dtype=input_ids.dtype))


def vision_token_ids(model: Any, processor: Any = None) -> tuple[int, ...]:
    """Return the ids of the placeholder tokens of images and videos, from the model's configuration and the processor.

    Args:
        model: transformers model, or its configuration.
        processor: its processor; None: only the configuration is looked at.
    """
    config = getattr(model, "config", model)
    found = {getattr(config, name, None) for name in _ID_NAMES}
    for name in ("image_token_id", "video_token_id"):
        found.add(getattr(processor, name, None))
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not None:
        for name in ("image_token", "video_token"):
            token = getattr(processor, name, None)
            if isinstance(token, str):
                index = tokenizer.convert_tokens_to_ids(token)
                found.add(index if index != getattr(tokenizer, "unk_token_id", None) else None)
    return tuple(sorted(token for token in found if isinstance(token, int) and not isinstance(token, bool)))


def special_token_ids(processor: Any) -> tuple[int, ...]:
    """Return the ids of the special tokens of a processor or tokenizer: what it declares, and what it adds as special.

    Raises:
        ConfigError: there is no tokenizer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "all_special_ids"):
        raise ConfigError(f"{type(processor).__name__} has no tokenizer: give a processor or a tokenizer.")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return tuple(sorted({*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}))
