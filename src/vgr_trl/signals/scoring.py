"""One pass without gradients over completions: log-probabilities, entropies and attention mass."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from vgr_trl.errors import ConfigError, DataError
from vgr_trl.sampling.images import split_images, stack_images
from vgr_trl.sharing import share_prompts, whole_groups
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals.attention import AttentionProbe
from vgr_trl.signals.measured import AttentionMass, RolloutSignals
from vgr_trl.signals.modality import build_modality_masks, vision_token_ids

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class RolloutScorer:
    """Scores completions with a transformers model, patched by TRL or not.

    Args:
        model: transformers model, also wrapped by DDP or PEFT.
        vision_token_ids: placeholder tokens of images and videos; None: those in the model's configuration.
        special_token_ids: tokens of the prompt that belong to neither modality (chat-template markers, vision start and
            end, bos, eos); padding never does.
        share_prompts: compute equal prompts of a batch once: `auto` and `on` do, `off` does not.
        batch_size: rows per forward pass, at least 1, made whole groups where prompts are shared; None: all. A pass
            holds the logits of its rows' completions.
        temperature: that logits are divided by, above 0.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        vision_token_ids: Sequence[int] | None = None,
        special_token_ids: Sequence[int] = (),
        share_prompts: str = "auto",
        batch_size: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        if share_prompts not in ("auto", "on", "off"):
            raise ConfigError(f"share_prompts is {share_prompts!r}: give auto, on or off.")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: give an integer of at least 1, or None.")
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}: give a number above 0.")
        self.model, self.shares, self.batch_size = model, share_prompts != "off", batch_size
        self.temperature = temperature
        self.vision_token_ids = _found(model) if vision_token_ids is None else tuple(vision_token_ids)
        self.special_token_ids = tuple(special_token_ids)

    def score(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        *,
        num_generations: int = 1,
        attention: bool = True,
        num_images: Sequence[int] | None = None,
        num_tiles: Sequence[int] | None = None,
        **image_inputs: torch.Tensor,
    ) -> RolloutSignals:
        """Return the signals of N completions.

        Args:
            prompt_ids, prompt_mask: (N, P), padded on the left.
            completion_ids, completion_mask: (N, T), padded on the right.
            num_generations: G, completions of a prompt that stand next to each other, at least 1.
            attention: whether attention mass is measured.
            num_images: images of each row; needed where the batch takes several passes and rows have not one each.
            num_tiles: rows of `pixel_values` of each row, where images are cut into tiles.
            image_inputs: pixel inputs and token types, (N, P) or (N, P + T), as the processor returns them.

        Raises:
            DataError: shapes differ, or image inputs cannot be assigned to rows.
            ConfigError: the attention of the model cannot be measured.
        """
        _check_shapes(prompt_ids, prompt_mask, completion_ids, completion_mask)
        batch = {
            "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
            "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
        }
        length = batch["input_ids"].size(1)
        for name in _TOKEN_TYPES:
            if (types := image_inputs.pop(name, None)) is not None:
                batch[name] = torch.nn.functional.pad(types, (0, length - types.size(1)))
        chunks = self._chunks(len(prompt_ids), num_generations)
        images = _images_of_chunks(image_inputs, chunks, len(prompt_ids), num_images, num_tiles)
        completion_length = completion_ids.size(1)
        logps, entropies = [], []
        with torch.no_grad(), ExitStack() as stack:
            probe = None
            if attention:
                masks = build_modality_masks(
                    prompt_ids,
                    prompt_mask,
                    vision_token_ids=self.vision_token_ids,
                    special_token_ids=self.special_token_ids,
                )
                rows = slice(prompt_ids.size(1) - 1, length - 1)
                probe = stack.enter_context(AttentionProbe(self.model, masks, rows=rows))
            if self.shares:
                stack.enter_context(share_prompts(self.model, completion_length))
            for chunk, pixels in zip(chunks, images, strict=True):
                inputs = {name: value[chunk] for name, value in batch.items()} | pixels
                scored = self._score_chunk(inputs, completion_length)
                logps.append(scored[0])
                entropies.append(scored[1])
        mask = completion_mask.bool()
        mass = None if probe is None else _with_mask(probe.mass, mask)
        return RolloutSignals(torch.cat(logps), torch.cat(entropies), mask, mass)

    def _chunks(self, rows: int, num_generations: int) -> list[slice]:
        size = rows if self.batch_size is None else self.batch_size
        size = whole_groups(size, num_generations) if self.shares else size
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]

    def _score_chunk(self, inputs: dict[str, Any], completion_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, (rows, T) float32; one row's distribution in float32 at a time."""
        outputs = self.model(**inputs, logits_to_keep=completion_length + 1, use_cache=False)
        logits = outputs.logits[:, -completion_length - 1 : -1]  # (rows, T, vocabulary)
        targets = inputs["input_ids"][:, -completion_length:]
        logps, entropies = [], []
        for row, row_targets in zip(logits, targets, strict=True):
            distribution = torch.log_softmax(row.float() / self.temperature, dim=-1)
            logps.append(distribution.gather(-1, row_targets.unsqueeze(-1)).squeeze(-1))
            entropies.append(-(distribution.exp() * distribution).sum(-1))
        return torch.stack(logps), torch.stack(entropies)


def _found(model: Any) -> tuple[int, ...]:
    return vision_token_ids(causal_model(model))


def _with_mask(mass: AttentionMass, mask: torch.Tensor) -> AttentionMass:
    mass.mask = mask
    return mass


def _check_shapes(*tensors: torch.Tensor) -> None:
    prompt_ids, prompt_mask, completion_ids, completion_mask = tensors
    if (
        prompt_ids.ndim != 2
        or completion_ids.ndim != 2
        or prompt_ids.shape != prompt_mask.shape
        or completion_ids.shape != completion_mask.shape
        or len(prompt_ids) != len(completion_ids)
    ):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise DataError(
            f"prompt_ids, prompt_mask, completion_ids and completion_mask have the shapes {shapes}: give (N, P) twice "
            "and (N, T) twice."
        )


def _images_of_chunks(
    inputs: dict[str, torch.Tensor],
    chunks: list[slice],
    rows: int,
    num_images: Sequence[int] | None,
    num_tiles: Sequence[int] | None,
) -> list[dict[str, torch.Tensor]]:
    if len(chunks) == 1 or not inputs:
        return [dict(inputs) for _ in chunks]
    counts = [1] * rows if num_images is None else list(num_images)
    given = {**inputs, "num_images": counts, "num_tiles": None if num_tiles is None else list(num_tiles)}
    parts, one_per_row = split_images(given, rows)
    return [stack_images(parts[chunk], one_per_row) for chunk in chunks]
