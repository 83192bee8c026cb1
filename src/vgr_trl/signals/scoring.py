"""Log-probabilities, entropies and attention of completions, with any model: `RolloutScorer`.

`Head` makes log-probabilities of hidden states, few positions at a time; `HiddenStateHook` keeps those of a pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn

from vgr_trl.batch import (
    IMAGE_INPUTS,
    TOKEN_TYPES,
    UnknownParts,
    parts_by_counts,
    parts_by_tokens,
    with_completion_types,
)
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    changed_hidden_states,
    has_sharded_parameters,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_forward import is_image_token
from vgr_trl.sharing.sharing import share_prompts, whole_groups
from vgr_trl.signals.attention import AttentionProbe, SimilarityProbe, find_decoder
from vgr_trl.signals.named import RolloutSignals, join_signals
from vgr_trl.signals.ratios import ModalityMasks, build_modality_masks, jensen_shannon, vision_token_ids
from vgr_trl.utils import ConfigError, DataError, patched_attribute

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput


LOGITS_AT_A_TIME = {"cpu": 2**23, "cuda": 2**26}  # 32 MB and 256 MB in float32; a GPU wants larger products


class Head:
    """What a model makes of last hidden states, with whatever it scales, caps or casts on the way.

    The model's own forward pass runs, with a base model that hands it the hidden states.

    Args:
        causal: transformers model with a head.
        output_type: class of what its base model returns.
    """

    def __init__(self, causal: Any, output_type: Callable[..., Any]) -> None:
        self.causal, self.output_type = causal, output_type
        self.vocabulary: int = causal.config.get_text_config(decoder=True).vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(C, vocabulary), for hidden states (C, D).

        Raises:
            ConfigError: the model's forward pass calls neither its base model nor its decoder.
        """
        outputs = self.output_type(last_hidden_state=hidden.unsqueeze(0))
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return outputs

        base, decoder = self.causal.base_model, find_decoder(self.causal)  # OPT's head calls the decoder of its base
        with patched_attribute(base, "forward", forward), patched_attribute(decoder, "forward", forward):
            logits: torch.Tensor = self.causal(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        if calls != 1:
            raise ConfigError(
                f"{type(self.causal).__name__} called its base model {calls} times where one call was expected: its "
                "head cannot be used alone, score with its own forward pass."
            )
        return logits

    def score(
        self, hidden: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of `tokens` and entropies of what they are drawn from, 0 where `mask` is False.

        Args:
            hidden: (N, T, D), of the queries that emit the tokens.
            tokens: (N, T) int64.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, entropies in nats.
        """

        def measure(states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            logps = torch.log_softmax(self._scaled(states, temperature), dim=-1)  # (C, vocabulary)
            return torch.stack([logps.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), _entropies(logps)])

        return self._by_position(measure, mask, hidden, tokens)

    def shift(
        self, hidden: torch.Tensor, others: torch.Tensor, mask: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how far two passes differ in what tokens are drawn from, and the entropies of the other pass.

        Args:
            hidden: (N, T, D), of the queries that emit the tokens.
            others: (N, T, D), of the same queries in the other pass.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, the Jensen-Shannon divergence and entropies, in nats; 0 where `mask` is False.
        """

        def measure(states: torch.Tensor, other_states: torch.Tensor) -> torch.Tensor:
            logits, other = (self._scaled(each, temperature) for each in (states, other_states))
            return torch.stack([jensen_shannon(logits, other), _entropies(torch.log_softmax(other, dim=-1))])

        return self._by_position(measure, mask, hidden, others, passes=2)

    def positions_at_a_time(self, device: torch.device, passes: int = 1) -> int:
        """Return for how many positions there is room for logits of so many passes."""
        return max(LOGITS_AT_A_TIME.get(device.type, LOGITS_AT_A_TIME["cpu"]) // (passes * self.vocabulary), 1)

    def _by_position(
        self, measure: Callable[..., torch.Tensor], mask: torch.Tensor, *of_tokens: torch.Tensor, passes: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two numbers of each position of the mask, some at a time, 0 elsewhere."""
        device = of_tokens[0].device
        count = self.positions_at_a_time(device, passes)
        found = torch.zeros(2, *mask.shape, device=device)
        if mask.any():
            parts = zip(*(values[mask].split(count) for values in of_tokens), strict=True)
            found[:, mask] = torch.cat([measure(*part) for part in parts], dim=1)
        return found[0], found[1]

    def _scaled(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        logits = self.logits(hidden).float()
        return logits if temperature == 1 else logits / temperature


def _entropies(logps: torch.Tensor) -> torch.Tensor:
    """Return the entropies of (C, vocabulary) log-probabilities, which are changed in place."""
    probabilities = logps.exp()
    # A forbidden token has the logit -inf and adds nothing.
    sums: torch.Tensor = torch.linalg.vecdot(probabilities, logps.clamp_(min=torch.finfo(logps.dtype).min))
    return -sums


class HiddenStateHook:
    """Keeps the hidden states of the positions that emit completions, in the latest block.

    Args:
        make: makes what is kept, (N, T, …), of hidden states (N, T, D); None: they are kept themselves.
        reads: whether the passes of a model are read; None: those of every model are.

    Attributes:
        output_type: class of what base models return.
    """

    def __init__(
        self,
        make: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reads: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        self._make, self._reads = make, reads
        self._kept: list[torch.Tensor] = []
        self.output_type: Any = None

    @contextmanager
    def around(self, model: nn.Module, completion_length: int) -> Iterator[None]:
        """Read the passes of this block, over completions of T tokens."""
        if self._reads is not None and not self._reads(model):
            yield
            return
        base = base_of(causal_model(model))
        plain, self._kept = base.forward, []

        @wraps(plain)
        def read(*args: Any, **kwargs: Any) -> Any:
            outputs = plain(*args, **kwargs)
            self.output_type = type(outputs)
            hidden = outputs.last_hidden_state[:, -completion_length - 1 : -1]  # (N, T, D)
            self._kept.append(hidden if self._make is None else self._make(hidden))
            return outputs

        with patched_attribute(base, "forward", read):
            yield

    def take(self) -> torch.Tensor | None:
        """Return what the latest block read, and forget it; None if it read nothing."""
        kept, self._kept = self._kept, []
        return torch.cat(kept) if kept else None


@contextmanager
def head_of_rows(model: nn.Module, rows: Sequence[int] | None) -> Iterator[None]:
    """Let passes that ask for TRL's fused head go through it with some rows only; what they return of others is NaN.

    Args:
        rows: of the batch, whose chunks pass in order; None: no row. Where there are rows, each chunk takes at least
            one, so that processes which share a sharded head call it equally often.
    """
    from trl.trainer.utils import FusedCausalLMOutput  # only TRL's passes come here, and this room runs without TRL

    causal = causal_model(model)
    plain, passed = causal.forward, 0

    def forward(*args: Any, fused_lm_head: bool, **kwargs: Any) -> "FusedCausalLMOutput":
        nonlocal passed
        labels = {name: kwargs.pop(name) for name in ("labels", "shift_labels") if name in kwargs}
        shape = next(iter(labels.values())).shape
        if rows is None:
            hidden = causal.base_model(*args, **kwargs, use_cache=False).last_hidden_state
            nothing = hidden.new_full(shape, torch.nan, dtype=torch.float32)
            return FusedCausalLMOutput(log_probs=nothing, entropy=nothing)
        chosen = [row - passed for row in rows if passed <= row < passed + shape[0]] or [0]
        passed += shape[0]
        own = {name: values[chosen] for name, values in labels.items()}
        with changed_hidden_states(causal.base_model, itemgetter(chosen)):
            outputs = plain(*args, fused_lm_head=True, **own, **kwargs)
        return FusedCausalLMOutput(
            log_probs=_among(shape[0], chosen, outputs.log_probs), entropy=_among(shape[0], chosen, outputs.entropy)
        )

    forward.of_rows = True  # type: ignore[attr-defined]
    with patched_attribute(causal, "forward", forward):
        yield


def leaves_rows_out(model: nn.Module) -> bool:
    """Whether passes of a model leave out the head for some rows, by `head_of_rows`."""
    return hasattr(causal_model(model).forward, "of_rows")


def _among(count: int, rows: list[int], values: torch.Tensor) -> torch.Tensor:
    """Values of some rows as those of all; NaN elsewhere."""
    every = values.new_full((count, *values.shape[1:]), torch.nan, dtype=torch.float32)
    every[rows] = values.float()
    return every


def cut_images(
    inputs: Mapping[str, torch.Tensor],
    is_image: torch.Tensor,
    num_images: Sequence[int] | None,
    num_tiles: Sequence[int] | None,
    chunks: Sequence[slice],
) -> list[dict[str, torch.Tensor]]:
    """Return the image inputs of each chunk of rows, nothing for a chunk without images.

    Args:
        inputs: image inputs as processors return them: an entry per row, image, tile or patch.
        is_image: (N, P) bool, placeholder tokens of images; nowhere True if the model does not say which they are.
        num_images: (N,) images of each row. None: as many as its placeholder tokens are worth.
        num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles.
        chunks: rows of each.

    Raises:
        DataError: the inputs cannot be assigned to rows, or the counts contradict inputs or tokens.
    """
    if unknown := sorted(inputs.keys() - set(IMAGE_INPUTS)):
        raise DataError(f"The input {unknown[0]} cannot be cut into chunks: score all rows at once (batch_size=None).")
    has_image = is_image.any(1).tolist() if num_images is None else [int(count) > 0 for count in num_images]  # (N,)
    try:
        if num_images is None:
            parts = parts_by_tokens(inputs, is_image)
        else:
            parts = parts_by_counts(inputs, num_images, num_tiles)
            if len(has_image) != len(is_image) or (is_image.any() and has_image != is_image.any(1).tolist()):
                raise UnknownParts("image tokens in other rows")
    except UnknownParts as error:
        raise DataError(
            f"The images of {len(is_image)} rows cannot be cut into chunks ({error.reason}): give num_images, and "
            "num_tiles where images are cut into tiles: one number for each row, more than 0 where it has image tokens."
        ) from error
    return [
        {name: value[parts[name][rows][0].start : parts[name][rows][-1].stop] for name, value in inputs.items()}
        if any(has_image[rows])
        else {}
        for rows in chunks
    ]


def policy_is_active(model: torch.nn.Module) -> bool:
    """Whether the adapters of `model`, if it has any, are those being trained: not switched off, not a reference."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            return module.has_active_enabled_adapter and "ref" not in module.active_adapters
    return True


class RolloutScorer:
    """Scores completions with a transformers model, and measures on the way what their tokens looked at.

        scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
        signals = scorer.score(prompt_ids, prompt_mask, completion_ids, completion_mask, num_generations=8, **images)
        vision_gain_ratio(signals.attention)

    Args:
        model: any transformers model with a head, also wrapped by DDP or PEFT, or patched by TRL; whole parameters.
        vision_token_ids: placeholder tokens of images and videos. None: those of the model's configuration.
        special_token_ids: tokens that belong to no modality, needed for attention; those of a processor are found by
            `vgr_trl.signals.ratios.special_token_ids`.
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
        self.model, self.causal = model, causal_model(model)
        if has_sharded_parameters(model):
            raise ConfigError("The parameters of the model are sharded: score in DAPOTrainer, or gather them before.")
        if (adapter := why_adapter_reads_whole_rows(model)) is not None:
            raise ConfigError(f"The model has an adapter by {adapter}: use another method.")
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
        _check_padding(prompt_mask, completion_mask)
        count, length = completion_ids.shape
        device = self.causal.get_input_embeddings().weight.device
        batch = {
            "input_ids": torch.cat([prompt_ids, completion_ids], dim=1).to(device),  # (N, P + T)
            "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1).to(device),
        }
        given = {name: value.to(device) for name, value in image_inputs.items() if value is not None}
        images = {name: value for name, value in given.items() if name not in TOKEN_TYPES}
        batch |= with_completion_types(given, self.causal.config, prompt_ids.size(1) + length)
        step = count if self.batch_size is None else self.batch_size
        if step < count and self.share_prompts != "off":
            step = whole_groups(step, num_generations)
        chunks = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        images_of = [images] * len(chunks)
        if images and (step < count or num_images is not None):
            is_image = is_image_token(prompt_ids, self.causal.config) & prompt_mask.bool()  # (N, P)
            images_of = cut_images(images, is_image, num_images, num_tiles, chunks)
        parts = []
        with torch.no_grad(), _evaluating(self.model):
            for rows, image_parts in zip(chunks, images_of, strict=True):
                inputs = {name: value[rows] for name, value in batch.items()} | image_parts
                region = None if regions is None else regions[rows].bool().to(device)
                parts.append(self._score_rows(inputs, length, attention, similarity, region))
        return join_signals(parts)

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
        vision = self.vision_token_ids if self.vision_token_ids is not None else vision_token_ids(self.causal)
        if not vision or (attention and self.special_token_ids is None):
            raise ConfigError(
                "Attention is measured with special_token_ids and vision_token_ids, similarity with vision_token_ids: "
                "give lists of ids, or attention=False and similarity=False."
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


def _check_padding(prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> None:
    if not bool(prompt_mask[:, -1].all()):
        raise DataError("A prompt ends with padding: pad prompts on the left, so that completions follow them.")
    if bool((completion_mask[:, 1:] > completion_mask[:, :-1]).any()):
        raise DataError(
            "completion_mask has a 0 in front of a 1, a token that no other would see: give 1 for every token of the "
            "completion, and leave tokens out of what is returned."
        )


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
