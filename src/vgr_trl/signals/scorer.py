"""Score completions with any transformers model, without a trainer."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vgr_trl.batch import Batch
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.patching import evaluating
from vgr_trl.pixels import TOKEN_TYPES, RowImages, extend_token_types
from vgr_trl.sharing.context_manager import share_prompts
from vgr_trl.sharing.model_support import (
    SharingReport,
    causal_model,
    has_sharded_parameters,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_split import is_image_token, round_up_to_groups
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.ratios import vision_token_ids
from vgr_trl.signals.scoring import AttentionPlan, Want, compute_by_base, cut_rows, score_in_chunks


@dataclass(eq=False, repr=False)
class RolloutScorer:
    """Scores completions with a transformers model, and measures in the same pass which tokens looked at the image.

    Example:
        >>> model, processor = build_tiny_vlm([])  # from vgr_trl.demo.tiny_model
        >>> text = "<|vision_start|><|image_pad|><|vision_end|>which colour is it?"
        >>> images = [[Image.new("RGB", (56, 56), "red")]] * 2
        >>> prompts = processor(text=[text] * 2, images=images, return_tensors="pt")
        >>> columns = prompts.pop("input_ids"), prompts.pop("attention_mask"), *torch.ones(2, 2, 3).long()
        >>> scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
        >>> vision_gain_ratio(scorer.score(*columns, num_generations=2, **prompts).attention).shape
        torch.Size([2])

    Args:
        model: any transformers model with a head and whole parameters, also wrapped by DDP or PEFT, or patched by TRL.
        vision_token_ids: placeholder tokens of images and videos. None: the ones that the model's configuration names.
        special_token_ids: tokens that belong to no modality, needed for attention;
            `vgr_trl.signals.ratios.special_token_ids` finds the special tokens of a processor.
        share_prompts: `auto` computes each prompt once where that is exact, `on` raises where it is not, `off` never.
        batch_size: rows of a chunk, rounded to whole groups where prompts are shared. None: all.
        temperature: logits are divided by it; above 0.
        similarity_layer: hidden states that are compared, as `SimilarityProbe` takes it.
        similarity_over: how they are compared, likewise.

    Raises:
        ConfigError: an argument is not accepted.
    """

    model: nn.Module
    _: KW_ONLY
    vision_token_ids: Sequence[int] | None = None
    special_token_ids: Sequence[int] | None = None
    share_prompts: str = "auto"
    batch_size: int | None = None
    temperature: float = 1.0
    similarity_layer: int = -1
    similarity_over: str = "max"

    def __post_init__(self) -> None:
        if self.share_prompts not in ("auto", "on", "off"):
            raise ConfigError(f"share_prompts is {self.share_prompts!r}: give auto, on or off.")
        self.causal = causal_model(self.model)
        if has_sharded_parameters(self.model):
            raise ConfigError("The parameters of the model are sharded: score in DAPOTrainer, or gather them before.")
        if (adapter := why_adapter_reads_whole_rows(self.model)) is not None:
            raise ConfigError(f"The model has an adapter of the type {adapter}: use another type.")

    def score(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        num_generations: int = 1,
        attention: bool = True,
        similarity: bool = False,
        regions: Tensor | None = None,
        num_images: Sequence[int] | None = None,
        num_tiles: Sequence[int] | None = None,
        **image_inputs: Tensor,
    ) -> RolloutSignals:
        """Return the signals of N completions of T tokens.

        Args:
            prompt_ids: (N, P), padded on the left; the G completions of a prompt stand together.
            prompt_mask: (N, P), 0 for padding.
            completion_ids: (N, T), padded on the right.
            completion_mask: (N, T), 1 for the tokens of a completion, 0 for the padding behind them; all 0 for a
                completion that does not count.
            num_generations: G.
            attention: measure attention mass.
            similarity: measure the similarity of hidden states to the image.
            regions: (N, P) bool, vision tokens whose attention is measured apart; None: none.
            num_images: (N,) images of each row, where rows pass in chunks. None: counted from its image tokens.
            num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles beside `num_images`.
            image_inputs: other outputs of the processor for the N rows; token types are (N, P), or (N, P + T), which
                are used unchanged: for PaliGemma they are 1 in completions (TRL pads with 0, under which a completion
                sees its own future; `DAPOTrainer` corrects that).

        Returns:
            Signals with log-probabilities and entropies, 0 outside the mask, attention mass and similarity.

        Raises:
            DataError: the shapes do not fit together, or images cannot be assigned to the rows of a chunk.
            ConfigError: attention is wanted and cannot be measured, or `share_prompts` is `on` and prompts cannot be
                shared.
        """
        _check_masks(prompt_mask, completion_mask)
        count, length = completion_ids.shape
        step = round_up_to_groups(self.batch_size or count, 1 if self.share_prompts == "off" else num_generations)
        batch = Batch(prompt_ids, prompt_mask, completion_ids, completion_mask).map(self._to_device)
        inputs = {name: self._to_device(value) for name, value in image_inputs.items() if value is not None}
        batch.columns |= extend_token_types(inputs, self.causal.config, batch.width + length)
        pixels = {name: value for name, value in inputs.items() if name not in TOKEN_TYPES}
        batch.images = RowImages(pixels, num_images, num_tiles)
        if step < count and num_images is None and "pixel_values" in pixels:
            is_image = is_image_token(batch.ids, self.causal.config) & batch.model_inputs["attention_mask"].bool()
            batch.images = RowImages.count(pixels, is_image)
        compute = partial(compute_by_base, self.temperature)
        want = Want(entropies=True, attention=self._attention_plan(attention, similarity, regions))
        shared = nullcontext(SharingReport()) if self.share_prompts == "off" else share_prompts(self.model, length)
        with torch.no_grad(), evaluating(self.model), shared as report:
            read: Any = score_in_chunks(self.causal, batch, want, compute, cut_rows(count, step))
        if self.share_prompts == "on" and (reasons := report.plain.keys() - {"no prompt occurs twice"}):
            raise ConfigError(f"share_prompts is on, but prompts could not be shared: {min(reasons)}; use auto or off.")
        return RolloutSignals(read.logps, read.entropies, read.mask, read.attention, similarity=read.similarity)

    def _to_device(self, value: Tensor) -> Tensor:
        return value.to(self.causal.get_input_embeddings().weight.device)

    def _attention_plan(self, attention: bool, similarity: bool, regions: Tensor | None) -> AttentionPlan | None:
        if not (attention or similarity):
            return None
        vision = self.vision_token_ids if self.vision_token_ids is not None else vision_token_ids(self.causal)
        if not vision or (attention and self.special_token_ids is None):
            raise ConfigError("Give vision_token_ids, for attention special_token_ids too, or attention=False.")
        similar = (self.similarity_layer, self.similarity_over) if similarity else None
        return AttentionPlan(vision, self.special_token_ids or (), mass=attention, region=regions, similarity=similar)


def _check_masks(prompt_mask: Tensor, completion_mask: Tensor) -> None:
    """Raise `DataError` if padding stands between a prompt and its completion, or within a completion."""
    if not bool(prompt_mask[:, -1].all()):
        raise DataError("A prompt ends with padding: pad prompts on the left, so that completions follow them.")
    if bool((completion_mask[:, 1:] > completion_mask[:, :-1]).any()):
        raise DataError("completion_mask has a 0 before a 1: give 1 for every token of a completion.")
