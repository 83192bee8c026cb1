"""Log-probabilities, entropies and attention of completions, in one pass without gradients per chunk of rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from vgr_trl.batch.inputs import TOKEN_TYPES
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.batch.token_columns import map_signals, with_completion_types
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.sharing import share_prompts, whole_groups
from vgr_trl.sharing.backbone import causal_model, has_sharded_parameters
from vgr_trl.sharing.fitness import why_adapter_reads_whole_rows
from vgr_trl.sharing.image_inputs import is_image_token
from vgr_trl.signals.attention.probe import AttentionProbe
from vgr_trl.signals.head import Head
from vgr_trl.signals.image_chunks import cut_images
from vgr_trl.signals.modality import ModalityMasks, build_modality_masks, vision_token_ids
from vgr_trl.signals.similarity import SimilarityProbe


class RolloutScorer:
    """Scores completions with a transformers model, and measures on the way what their tokens looked at.

        scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
        signals = scorer.score(prompt_ids, prompt_mask, completion_ids, completion_mask, num_generations=8, **images)
        vision_gain_ratio(signals.attention)

    Args:
        model: any transformers model with a head, also wrapped by DDP or PEFT, or patched by TRL; whole parameters.
        vision_token_ids: placeholder tokens of images and videos. None: those of the model's configuration.
        special_token_ids: tokens that belong to no modality, needed for attention; those of a processor are found by
            `vgr_trl.signals.modality.special_token_ids`.
        share_prompts: `auto` computes each prompt once where that is exact, `on` raises where it is not, `off` never.
        batch_size: rows that pass at a time, made whole groups where prompts are shared. None: all.
        temperature: logits are divided by it; above 0.
        similarity_layer, similarity_over: hidden states that are compared, and how, as `SimilarityProbe` takes them.

    Raises:
        ConfigError: an argument is not accepted.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vision_token_ids: Sequence[int] | None = None,
        special_token_ids: Sequence[int] | None = None,
        share_prompts: str = "auto",
        batch_size: int | None = None,
        temperature: float = 1.0,
        similarity_layer: int = -1,
        similarity_over: str = "max",
    ) -> None:
        if share_prompts not in ("auto", "on", "off"):
            raise ConfigError(f"share_prompts is {share_prompts!r}: give auto, on or off.")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: give an integer of at least 1, or None.")
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}: give a number above 0.")
        self.model, self.causal = model, causal_model(model)
        if has_sharded_parameters(model):
            raise ConfigError("The parameters of the model are sharded: score in DAPOTrainer, or gather them before.")
        if (adapter := why_adapter_reads_whole_rows(model)) is not None:
            raise ConfigError(f"The model has an adapter by {adapter}: use another method.")
        if self.causal.base_model is self.causal:
            raise ConfigError(f"{type(self.causal).__name__} has no head: give a model that returns logits.")
        if getattr(self.causal.config, "is_encoder_decoder", False):
            raise ConfigError(f"{type(self.causal).__name__} reads prompts in an encoder: give a decoder with a head.")
        self.vision_token_ids, self.special_token_ids = vision_token_ids, special_token_ids
        self.share_prompts, self.batch_size, self.temperature = share_prompts, batch_size, temperature
        self.similarity_layer, self.similarity_over = similarity_layer, similarity_over

    def score(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
        *,
        num_generations: int = 1,
        attention: bool = True,
        similarity: bool = False,
        regions: torch.Tensor | None = None,
        num_images: Sequence[int] | None = None,
        num_tiles: Sequence[int] | None = None,
        **image_inputs: torch.Tensor,
    ) -> RolloutSignals:
        """Return the signals of N completions of T tokens.

        Args:
            prompt_ids: (N, P), padded on the left; the G completions of a prompt stand together.
            prompt_mask: (N, P), 0 for padding.
            completion_ids: (N, T), padded on the right.
            completion_mask: (N, T), 1 for the tokens of a completion, 0 for the padding behind them, or for all tokens
                of a completion that is left out.
            num_generations: G.
            attention: measure attention mass.
            similarity: measure the similarity of hidden states to the image.
            regions: (N, P) bool, vision tokens whose attention is measured apart; None: none.
            num_images: (N,) images of each row, where rows pass in chunks. None: as many as its tokens are worth.
            num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles and `num_images` is
                given.
            image_inputs: what the processor returns beside the tokens for the N rows; token types are (N, P), or
                (N, P + T), which are taken as they are: for PaliGemma they are 1 in completions (TRL pads with 0, under
                which a completion sees its own future; `DAPOTrainer` corrects that).

        Returns:
            Log-probabilities and entropies (0 where the mask is), the attention mass and the similarity.

        Raises:
            DataError: the shapes do not fit together, or images cannot be assigned to the rows of a chunk.
            ConfigError: attention is wanted and cannot be measured, or `share_prompts` is `on` and prompts cannot be
                shared.
        """
        count, length = _checked(num_generations, prompt_ids, prompt_mask, completion_ids, completion_mask)
        device = self.causal.get_input_embeddings().weight.device
        batch = {
            "input_ids": torch.cat([prompt_ids, completion_ids], dim=1).to(device),  # (N, P + T)
            "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1).to(device),
        }
        given = {name: value.to(device) for name, value in image_inputs.items() if value is not None}
        images = {name: value for name, value in given.items() if name not in TOKEN_TYPES}
        batch |= with_completion_types(given, self.causal.config, count, prompt_ids.size(1), length)
        step = count if self.batch_size is None else self.batch_size
        if step < count and self.share_prompts != "off":
            step = whole_groups(step, num_generations)
        chunks = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        images_of = [images] * len(chunks)
        if images and (step < count or num_images is not None):
            is_image = is_image_token(prompt_ids, self.causal.config) & prompt_mask.bool()  # (N, P)
            images_of = cut_images(images, is_image, num_images, num_tiles, chunks)
        if regions is not None and (not attention or regions.shape != prompt_ids.shape):
            raise DataError(
                f"regions has the shape {tuple(regions.shape)} for prompts {tuple(prompt_ids.shape)}, with attention "
                f"{attention}: give one value for each token of a prompt, and attention=True."
            )
        parts = []
        with torch.no_grad(), _evaluating(self.model):
            for rows, own in zip(chunks, images_of, strict=True):
                inputs = {name: value[rows] for name, value in batch.items()} | own
                region = None if regions is None else regions[rows].bool().to(device)
                parts.append(self._score_rows(inputs, length, attention, similarity, region))
        return map_signals(parts, torch.cat)

    def _score_rows(
        self,
        inputs: dict[str, torch.Tensor],
        length: int,
        attention: bool,
        similarity: bool,
        region: torch.Tensor | None,
    ) -> RolloutSignals:
        mask = inputs["attention_mask"][:, -length:].bool()  # (B, T)
        probe, similar = None, None
        masks = self._masks(inputs, length, attention) if attention or similarity else None
        if masks is not None and attention:
            masks.region = None if region is None else region & masks.vision
            probe = AttentionProbe(self.causal, masks)
        if masks is not None and similarity:
            similar = SimilarityProbe(self.causal, masks.vision, self.similarity_layer, self.similarity_over)
        with self._shared(length), probe or nullcontext(), similar or nullcontext():
            outputs = self.causal.base_model(**inputs, use_cache=False, return_dict=True)
        hidden = outputs.last_hidden_state[:, -length - 1 : -1]  # (B, T, D)
        tokens = inputs["input_ids"][:, -length:]
        logps, entropies = Head(self.causal, type(outputs)).score(hidden, tokens, mask, self.temperature)
        mass = None if probe is None else replace(probe.mass, mask=mask)
        return RolloutSignals(logps, entropies, mask, mass, similarity=None if similar is None else similar.similarity)

    def _masks(self, inputs: dict[str, torch.Tensor], length: int, attention: bool) -> ModalityMasks:
        if attention and self.special_token_ids is None:
            raise ConfigError(
                "Attention cannot be measured without special_token_ids: give a list of ids, or attention=False."
            )
        vision = self.vision_token_ids if self.vision_token_ids is not None else vision_token_ids(self.causal)
        if not vision:
            raise ConfigError(
                "Attention and similarity cannot be measured without vision_token_ids: give a list of ids, or "
                "attention=False and similarity=False."
            )
        return build_modality_masks(
            inputs["input_ids"][:, :-length],
            inputs["attention_mask"][:, :-length],
            vision_token_ids=vision,
            special_token_ids=self.special_token_ids or (),
        )

    @contextmanager
    def _shared(self, length: int) -> Iterator[None]:
        if self.share_prompts == "off":
            yield
            return
        with share_prompts(self.model, length) as report:
            yield
        reasons = report.plain.keys() - {"no prompt occurs twice"}
        if self.share_prompts == "on" and reasons:
            raise ConfigError(f"share_prompts is on, but prompts could not be shared: {min(reasons)}; use auto or off.")


def _checked(num_generations: int, *batch: torch.Tensor) -> tuple[int, int]:
    """N and T of prompts, completions and their masks that fit together."""
    shapes = [tuple(value.shape) for value in batch]
    _, prompt_mask, _, completion_mask = batch
    prompt, completion = shapes[0], shapes[2]
    fit = len(prompt) == len(completion) == 2 and prompt[0] == completion[0] and 0 not in prompt + completion
    if not fit or shapes != [prompt, prompt, completion, completion]:
        raise DataError(
            f"prompt_ids, prompt_mask, completion_ids and completion_mask have the shapes {shapes}: give (N, P) "
            "twice and (N, T) twice, with at least one row and token."
        )
    count, length = completion
    if num_generations < 1 or count % num_generations:
        raise DataError(f"There are {count} completions with num_generations {num_generations}: give whole groups.")
    if not bool(prompt_mask[:, -1].all()):
        raise DataError("A prompt ends with padding: pad prompts on the left, so that completions follow them.")
    if bool((completion_mask[:, 1:] > completion_mask[:, :-1]).any()):
        raise DataError(
            "completion_mask has a 0 in front of a 1: what it leaves out no other token sees, so give 1 for every "
            "token of the completion, and leave tokens out of what is returned."
        )
    return count, length


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and gradient checkpointing off for the duration."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
