"""Measure attention on image and instruction, and similarity to the image, while a model runs.

The attention mass on a set of keys is the attention output for values that are 1 on the set and 0 elsewhere. While an
`AttentionProbe` is active, every attention call of the language model runs as usual, and then once more for the
queries of interest, with indicator columns as values. Only eager attention makes an (H, T, S) matrix.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.functional import normalize
from transformers.generation import GenerationMode

from vgr_trl.errors import ConfigError
from vgr_trl.patching import patched_method
from vgr_trl.pixels import on_device
from vgr_trl.sharing.attention import wrap_attention
from vgr_trl.sharing.model_support import (
    attention_modules,
    cache_of,
    causal_model,
    indexed_modules,
    is_compiled,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.row import ROW, PackedRow
from vgr_trl.signals.plan import Pass, PassPlan, Queries, positions_seen
from vgr_trl.signals.ratios import AttentionMass, ModalityMasks, build_modality_masks, entropies_of

SUPPORTED = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


def find_decoder(model: nn.Module) -> Any:
    """Return the language model of a transformers model, also wrapped by DDP, DeepSpeed or PEFT."""
    causal = causal_model(model)
    return causal.get_decoder() or causal


def count_attention_layers(model: nn.Module) -> int:
    """Return L, the number of attention layers in the language model; other layers are not measured."""
    return len({module.layer_idx for module in attention_modules(find_decoder(model))})


def why_not_measurable(model: nn.Module) -> str | None:
    """Return why the attention of a model cannot be measured, or None if it can."""
    if is_compiled(model):
        return "the model is compiled, and a compiled pass calls no other attention; switch torch.compile off."
    if (adapter := why_adapter_reads_whole_rows(model)) is not None:
        return f"the model has an adapter of the type {adapter}; use another type."
    if causal_model(model).config.is_encoder_decoder:
        return f"{type(causal_model(model)).__name__} has an encoder for prompts; use a decoder-only model."
    decoder = find_decoder(model)
    if (used := decoder.config._attn_implementation) not in SUPPORTED:
        return f"the attention implementation is {used!r}; load the model with one of {', '.join(SUPPORTED)}."
    if not decoder._can_set_attn_implementation():
        return f"{type(decoder).__name__} does not use the attention registry of transformers; use another model."
    if not count_attention_layers(model):
        return f"{type(decoder).__name__} has no attention layers with a layer_idx."
    return None


class _Probe(ExitStack):
    """A block that measures the attention layers of a model, which has to be measurable."""

    def __init__(self, model: nn.Module) -> None:
        if (why := why_not_measurable(model)) is not None:
            raise ConfigError(f"Attention cannot be measured: {why}")
        super().__init__()
        self._causal, decoder = causal_model(model), find_decoder(model)
        self._attention, self._modules = attention_modules(decoder), set(indexed_modules(decoder))


class AttentionProbe(_Probe):
    """Measures how much attention the queries of a batch pay to vision and instruction tokens, within its block.

    Example:
        >>> model, processor = build_tiny_vlm([])  # from vgr_trl.demo.tiny_model
        >>> text = "<|vision_start|><|image_pad|><|vision_end|>which colour is it?"
        >>> inputs = processor(text=[text], images=[Image.new("RGB", (56, 56), "red")], return_tensors="pt")
        >>> tokens = {"vision_token_ids": vision_token_ids(model), "special_token_ids": special_token_ids(processor)}
        >>> masks = build_modality_masks(inputs.input_ids, inputs.attention_mask, **tokens)
        >>> with AttentionProbe(model, masks) as probe:
        ...     _ = model(**inputs)
        >>> vision_gain_ratio(probe.mass).shape
        torch.Size([1])

    The batch may run in several calls of consecutive rows, with gradient checkpointing, and with `share_prompts`. The
    model returns the same outputs as without a probe.

    Args:
        model: transformers model, also wrapped, with sdpa, flash or eager attention.
        masks: masks of the prompts (N, P), or of whole sequences (N, S).
        rows: query positions to measure, a slice or a sequence of integers. None: with masks (N, P) the positions that
            emit completions, P - 1 to S - 2; with masks (N, S) all S.
        keep_rows: rows of the batch whose attention over vision tokens is kept: `kept[row]` is (L, T, V) float32, the
            mean over heads, for the V vision tokens of this row in order.
        keep_layers: layers whose attention is kept, of the L layers with attention; None: all.
        measure_prompt: whether to measure the queries of instruction tokens, for `prompt_mass`.
        packed: whether a row may be several sequences, with positions that restart at 0; then masks are (N, S).
        prompt: P, for masks (N, S): only positions that emit completions are measured, if `rows` is None.

    Raises:
        ConfigError: the attention of the model cannot be measured, or the model runs on rows or positions without a
            mask.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: ModalityMasks,
        rows: slice | Sequence[int] | None = None,
        keep_rows: Sequence[int] = (),
        measure_prompt: bool = False,
        keep_layers: Sequence[int] | None = None,
        packed: bool = False,
        prompt: int | None = None,
    ) -> None:
        super().__init__(model)
        sets = [tokens for tokens in (masks.vision, masks.instruction, masks.region) if tokens is not None]
        self.sides = len(sets)  # 2, or 3 with a region; each image is one more set
        images = () if masks.images is None else masks.images.unbind(-1)
        self.sets = torch.stack([*sets, *images], dim=-1)  # (N, P or S, C)
        self.plan = PassPlan(self.sets, rows, measure_prompt, prompt)
        self.keep_rows, self.packed = tuple(keep_rows), packed
        numbers = sorted({module.layer_idx for module in self._attention})
        self._kept_layers = set(numbers if keep_layers is None else map(numbers.__getitem__, keep_layers))
        self._masses: dict[int, torch.Tensor] = {}  # layer -> (N, T, 2)
        self._prompts: dict[int, torch.Tensor] = {}  # layer -> (N, 2), sums over instruction tokens as queries
        self._maps: dict[tuple[int, int], torch.Tensor] = {}  # (row, layer) -> (T, V)

    def __enter__(self) -> Self:
        self.plan.hook(self, self._causal.base_model, self._attention[0])
        self.enter_context(wrap_attention(partial(_attend_and_measure, self._measure, self.packed)))
        return self

    @property
    def mass(self) -> AttentionMass:
        """Attention mass (L, N, T) of the layers with attention; every token is valid.

        Raises:
            ConfigError: the model has run on fewer rows than the masks have.
        """
        sides = self._stack_layers(self._masses)  # (L, N, T', 2)
        sides = sides[:, :, on_device(self.plan.picks, sides.device)]  # (L, N, T, 2)
        return self._to_mass(sides, torch.ones(sides.shape[1:3], dtype=torch.bool, device=sides.device), self.sets)

    @property
    def image_mass(self) -> torch.Tensor:
        """Attention on each image of `masks.images`, (L, N, T, images)."""
        return self._stack_layers(self._masses)[:, :, self.plan.picks, self.sides :]

    @property
    def prompt_mass(self) -> AttentionMass:
        """Mean attention mass of a row's instruction tokens as queries, (L, N, 1), with `measure_prompt`.

        Queries before the image pay it no attention. A row without instruction tokens has no valid token.

        Raises:
            ConfigError: the model has run on fewer rows than the masks have.
        """
        sets = self.sets[:, : self.plan.prompt]
        queries = sets[..., 1].sum(1)  # (N,)
        sums = self._stack_layers(self._prompts).unsqueeze(2)  # (L, N, 1, 2)
        return self._to_mass(sums / queries.clamp(min=1)[:, None, None], (queries > 0).unsqueeze(1), sets)

    @property
    def kept(self) -> dict[int, torch.Tensor]:
        """Row -> attention over its vision tokens, (L, T, V) float32, for `keep_rows` and `keep_layers`."""
        self.plan.check_complete()
        layers = sorted(self._kept_layers & set(self._masses))
        picks = self.plan.picks
        return {row: torch.stack([self._maps[row, layer] for layer in layers])[:, picks] for row in self.keep_rows}

    def _stack_layers(self, values: dict[int, torch.Tensor]) -> torch.Tensor:
        self.plan.check_complete()
        return torch.stack([values[layer].to(self.sets.device) for layer in sorted(values)])

    def _to_mass(self, sides: torch.Tensor, mask: torch.Tensor, sets: torch.Tensor) -> AttentionMass:
        counts = sets.sum(1)  # (N, C)
        region = (sides[..., 2], counts[:, 2]) if self.sides == 3 else ()
        return AttentionMass(sides[..., 0], sides[..., 1], counts[:, 0], counts[:, 1], mask.to(sides.device), *region)

    @torch.no_grad()
    def _measure(self, call: "AttentionCall") -> None:
        current, module = self.plan.current, call.module
        if current is None or module not in self._modules or module.layer_idx in current.done:
            return
        layer, device = module.layer_idx, call.key.device
        current.done.add(layer)
        if layer not in self._masses:
            count, kinds = len(self.sets), self.sets.size(-1)
            self._masses[layer] = torch.zeros(count, len(self.plan.positions), kinds, device=device)
            self._prompts[layer] = torch.zeros(count, kinds, device=device)
        kept = {*self.keep_rows} & {*range(current.rows.start, current.rows.stop)} if layer in self._kept_layers else ()
        measure = self._measure_padded if current.row is None else self._measure_row
        measure(call, current, layer, kept)

    def _measure_padded(self, call: "AttentionCall", current: Pass, layer: int, kept: Collection[int]) -> None:
        """Measure a call over padded rows; `kept` are rows whose attention is kept token by token."""
        *queries, num_keys, device = call.shape
        sets = current.sets_of_keys(self.sets, tuple(queries), num_keys, device)  # (B, K, C)
        self._masses[layer][current.rows] = call.mass_on_keys(sets, current.emitting)
        for row in kept:
            index = row - current.rows.start
            keys = sets[index, :, 0].nonzero().flatten()  # (V,)
            single_keys = torch.nn.functional.one_hot(keys, num_keys).T.unsqueeze(0)  # (1, K, V)
            self._maps[row, layer] = call.mass_on_keys(single_keys, current.emitting, slice(index, index + 1))[0]
        if current.instruction is not None:
            mass = call.mass_on_keys(sets, current.instruction)  # (B, P', C)
            is_instruction = self.sets[current.rows][:, current.instruction.index.to(self.sets.device), 1].to(device)
            self._prompts[layer][current.rows] = (mass * is_instruction.unsqueeze(-1)).sum(1)  # over P'

    def _measure_row(self, call: "AttentionCall", current: Pass, layer: int, kept: Collection[int]) -> None:
        """Measure a call over a row of prompts and completions."""
        row, first = cast("PackedRow", current.row), current.rows.start
        sets = current.of_tokens(self.sets).to(call.key.device)  # (L, C)
        mass = call.mass_in_row(sets, row)
        self._masses[layer][current.rows] = _at(mass, current.places)
        for number in kept:
            alone, places = row.alone(row.batch_rows.index(number - first))
            keys = sets[places, 0].nonzero().flatten()
            single_keys = torch.nn.functional.one_hot(keys, len(places)).T  # (L', V)
            columns = alone.table[number - first, current.emitting.index]  # (T',)
            self._maps[number, layer] = _at(call.mass_in_row(single_keys, alone, places), columns)
        if current.instruction is not None:
            stop = self.sets.size(1) if self.plan.prompt is None else self.plan.prompt
            asks = mass * (sets[:, 1] & (row.tokens % row.shape[1] < stop)).unsqueeze(-1)  # (L, C)
            sums = [asks.new_zeros(len(lengths), asks.size(-1)) for lengths in (row.prompts, row.completions)]
            start = row.num_prompt_tokens
            for total, part in zip(sums, (slice(start), slice(start, None)), strict=True):
                total.index_add_(0, row.numbers[part], asks[part])
            self._prompts[layer][first + row.row_index] = sums[0][row.group_index] + sums[1]


def _at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather the rows of `values` (L, C) at `places` (…), 0 where a place is -1; return (…, C)."""
    return values[places.clamp(min=0)] * (places >= 0).unsqueeze(-1)


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention function, which can be repeated to measure attention on sets of keys.

    Attributes:
        function: attention function of transformers.
        module: attention layer that called it.
        query: (B, H, Q, D).
        key: (B, key heads, K, D).
        options: other arguments of the call; `attention_mask` is (B or 1, 1 or H, Q, K), for flash attention (B, K), or
            None.
        packed: whether a row may be several sequences, which flash attention separates by their positions; then the
            function runs again for all queries.
    """

    function: Callable[..., Any]
    module: Any
    query: torch.Tensor
    key: torch.Tensor
    options: dict[str, Any]
    packed: bool = False

    @property
    def shape(self) -> tuple[int, int, int, torch.device]:
        """B, Q, K and the device."""
        return self.query.size(0), self.query.size(2), self.key.size(2), self.key.device

    def mass_on_keys(self, sets: torch.Tensor, queries: Queries, rows: slice = slice(None)) -> torch.Tensor:
        """Return the attention on sets of keys, the mean over heads, (B', T', C) float32.

        Args:
            sets: (B', K, C), 1 for keys in a set and 0 for others, for B' of the B rows.
            queries: T' of the Q queries, to measure.
            rows: the B' of the B rows to measure.
        """
        key, query = self.key, self.query
        if self.packed:
            return self._attend(query, key, sets, self.options)[rows, queries.index]
        flash = "flash" in self.module.config._attn_implementation
        # Causal kernels align the last query with the last key, so the keys end at the last query's position.
        last = queries.stop if self._is_causal() else query.size(2)
        stop = key.size(2) - query.size(2) + last
        chosen = slice(queries.first, last) if flash else queries.index  # flash attention takes consecutive queries
        options = self._select_options(chosen, stop, rows, flash)
        mass = self._attend(query[rows, :, chosen], key[rows, :, :stop], sets[:, :stop], options)
        return mass[:, queries.index - queries.first] if flash else mass

    def mass_in_row(self, sets: torch.Tensor, row: PackedRow, places: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention that all tokens in a row pay to sets of keys, averaged over heads, (L', C) float32.

        Args:
            sets: (L', C), 1 for tokens in a set and 0 for others.
            row: layout.
            places: (L',) tokens of this call's row that stand in `row`; None: all.
        """
        query, key = (states if places is None else states[:, :, places] for states in (self.query, self.key))
        return self._attend(query, key, sets.unsqueeze(0), {**self.options, ROW: row})[0]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, sets: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Call the function with sets of keys, (B, K, C), as values; return the mean over heads, (B, Q, C) float32."""
        options, masses = {**options, "dropout": 0.0}, list[torch.Tensor]()
        mask = options.pop("attention_mask", None)
        for part in sets.split(key.size(-1), dim=-1):  # fused kernels require values as wide as keys
            values = part.to(key.dtype)
            if (missing := key.size(-1) - part.size(-1)) > 0:
                values = nn.functional.pad(values, (0, missing))
            values = values.unsqueeze(1).expand(-1, key.size(1), -1, -1)
            outputs, _ = self.function(self.module, query, key, values, mask, **options)  # (B, Q, H, D)
            masses.append(outputs[..., : part.size(-1)].mean(2, dtype=torch.float32))
        return torch.cat(masses, dim=-1)

    def _select_options(self, chosen: slice | torch.Tensor, stop: int, rows: slice, flash: bool) -> dict[str, Any]:
        """Return the arguments of the call for some rows and queries.

        Args:
            chosen: queries to keep, T'.
            stop: number of keys to keep, K'.
            rows: rows to keep, B'.
            flash: whether the function is flash attention.
        """
        if any(self.options.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")):
            raise ConfigError("Attention cannot be measured in packed sequences: pass one sequence per row, padded.")
        left_out = "position_ids", "output_attentions"
        kept = {name: value for name, value in self.options.items() if name not in left_out}
        for name in ("attention_mask", "position_bias"):
            if (per_query := kept.get(name)) is not None and per_query.ndim == 4:
                of_rows = per_query[rows] if per_query.size(0) > 1 else per_query
                kept[name] = of_rows[:, :, chosen, :stop]
        mask = kept.get("attention_mask")
        if mask is None and not flash and self._is_causal():  # the function's own causal mask needs all queries
            before, device = self.key.size(2) - self.query.size(2), self.key.device
            position = torch.arange(before, self.key.size(2), device=device)[chosen]  # (T',)
            kept["attention_mask"] = (position.unsqueeze(1) >= torch.arange(stop, device=device))[None, None]
        elif mask is not None and mask.ndim == 2:
            kept["attention_mask"] = mask[rows, :stop]
        return kept

    def _is_causal(self) -> bool:
        """Whether the kernel itself hides later keys from each query; a mask may do so otherwise."""
        mask = self.options.get("attention_mask")
        causal = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        return bool(causal) and self.query.size(2) > 1 and (mask is None or mask.ndim == 2)


def _attend_and_measure(
    measure: Callable[[AttentionCall], None], packed: bool, attention: Any,
    module: nn.Module, query: Any, key: Any, value: Any, *mask: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Call an attention function, then `measure` its call; layers pass the mask by position or by name."""
    outputs = attention(module, query, key, value, *mask, **kwargs)
    options = dict(zip(("attention_mask",), mask, strict=False)) | kwargs
    measure(AttentionCall(attention, module, query, key, options, packed))
    return outputs


def cosine_similarity(
    emitting: torch.Tensor, image: torch.Tensor, over: str, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare T hidden states with an image's hidden states by cosine similarity, (T,) float32 in [-1, 1].

    Args:
        emitting: (T, D) hidden states of the positions that emit tokens.
        image: (V, D) hidden states of the image tokens; if V is 0, all similarities are NaN.
        over: `max` or `mean` of the V cosines, or `centre`: the cosine to the mean of the V states.
        seen: (T,) number of leading image tokens that each position sees; None: all V.
    """
    if not len(image):
        return torch.full((len(emitting),), torch.nan, device=emitting.device)
    if seen is None:
        seen = torch.full((len(emitting),), len(image), device=emitting.device)
    states, image_states = normalize(emitting.float(), dim=-1), image.float()
    ranks = torch.arange(1, len(image_states) + 1, device=image_states.device)  # (V,)
    if over == "centre":
        image_states = image_states.cumsum(0) / ranks.unsqueeze(1)
    cosines = states @ normalize(image_states, dim=-1).T  # (T, V)
    if over != "centre":
        cosines = cosines.cummax(1).values if over == "max" else cosines.cumsum(1) / ranks
    cosines = cosines.gather(1, (seen - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return cosines.masked_fill(seen == 0, torch.nan)


class SimilarityProbe(ExitStack):
    """Measures how similar the hidden states that emit completions are to the image's, within its block.

        with SimilarityProbe(model, vision) as probe:
            model(**inputs)
        probe.similarity

    `cosine_similarity` compares them. The batch may run in several calls of consecutive rows, and with `share_prompts`;
    the image's hidden states then come from the pass over the prompts.

    Args:
        model: transformers model, also wrapped.
        vision: (N, P) bool, image tokens of the prompts; with `prompt` (N, S), image tokens of whole rows.
        layer: number of the hidden states, in [-L - 1, L].
        over: `max`, `mean` or `centre`, see `cosine_similarity`.
        prompt: P, where completions hold images: each position is compared with earlier images.

    Raises:
        ConfigError: the model has no such hidden states.
    """

    def __init__(
        self,
        model: nn.Module,
        vision: torch.Tensor,
        layer: int = -1,
        over: str = "max",
        prompt: int | None = None,
    ) -> None:
        super().__init__()
        self.vision, self.over = vision, over
        self._plan = PassPlan(vision.unsqueeze(-1), None, measure_prompt=False, prompt=prompt)
        self._seen = None if prompt is None else vision.cumsum(1)  # (N, S)
        self._base: Any = causal_model(model).base_model
        decoder = find_decoder(model)
        self._attention, layers = attention_modules(decoder)[0], decoder_layers(decoder)
        self._number = hidden_state_number(layer, len(layers))
        self._read = decoder if self._number == len(layers) else layers[max(self._number - 1, 0)]
        self._similarities: list[tuple[slice, torch.Tensor]] = []

    def __enter__(self) -> Self:
        self._plan.hook(self, self._base, self._attention)
        self.callback(self._read.register_forward_hook(self._measure, with_kwargs=True).remove)
        return self

    @property
    def similarity(self) -> torch.Tensor:
        """Similarity (N, T) float32; NaN for rows without an image.

        Raises:
            ConfigError: the model has run on fewer rows than `vision` has.
        """
        self._plan.check_complete()
        result = torch.full((len(self.vision), len(self._plan.positions)), torch.nan, device=self.vision.device)
        for rows, values in self._similarities:
            result[rows] = values.to(result.device)
        return result

    @torch.no_grad()
    def _measure(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        current = self._plan.current
        if current is None or self._number in current.done:
            return
        current.done.add(self._number)
        if self._number == 0:
            states = args[0] if args else kwargs["hidden_states"]  # (B, Q, D), or (1, L, D) of a row
        else:
            states = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        shape = current.shape if current.row is None else (1, len(current.row.tokens))
        if states.shape[:2] != shape:
            shapes = f"{tuple(states.shape)} instead of {shape}"
            raise ConfigError(f"The hidden states have the shape {shapes}: give another hidden_similarity_layer.")
        positions, values = current.emitting.index.to(states.device), []
        for index, row in enumerate(range(current.rows.start, current.rows.stop)):
            of_row = states[index] if current.row is None else states[0][current.row.table[index]]  # (S, D)
            vision = self.vision[row].nonzero().flatten().to(states.device)
            seen = None if self._seen is None else self._seen[row].to(states.device)[positions]
            values.append(cosine_similarity(of_row[positions], of_row[vision], self.over, seen))
        self._similarities.append((current.rows, torch.stack(values)))


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers of a language model.

    Raises:
        ConfigError: the model has no list of layers.
    """
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and attention_modules(module):
            return module
    raise ConfigError(f"{type(decoder).__name__} has no list of layers: hidden states cannot be compared.")


def hidden_state_number(layer: int, layers: int) -> int:
    """Convert a number of hidden states in [-L - 1, L] to a number in [0, L].

    Raises:
        ConfigError: the number is outside [-L - 1, L].
    """
    if not -layers - 1 <= layer <= layers:
        raise ConfigError(f"hidden_similarity_layer is {layer}: give a number in [{-layers - 1}, {layers}].")
    return layer % (layers + 1)


class GenerationProbe(_Probe):
    """Measures the tokens that `model.generate` samples, each in the pass that samples it, within its block.

        with GenerationProbe(model, vision_token_ids=..., special_token_ids=...) as probe:
            model.generate(**inputs)
        probe.mass, probe.logps, probe.entropies

    With `share_prompts`, enter the probe last.

    Args:
        model: transformers model, also wrapped by DDP or PEFT.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens without a modality.
        temperature: divisor of the logits.

    Attributes:
        mass: attention mass of the latest generation, (L, N, T); every token is valid.
        logps: (N, T) float32, log-probabilities of the latest generation under the model's full distribution, without
            `top_p` and other filters.
        entropies: (N, T) float32, entropies of this distribution in nats.

    Raises:
        ConfigError: the attention of the model cannot be measured, or it generates with beams, an assistant or a cache
            of fixed length.
    """

    mass: AttentionMass
    logps: torch.Tensor
    entropies: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        vision_token_ids: Sequence[int],
        special_token_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> None:
        super().__init__(model)
        self._ids = {"vision_token_ids": vision_token_ids, "special_token_ids": special_token_ids}
        self._temperature = temperature

    def __enter__(self) -> Self:
        self.enter_context(patched_method(self._causal, "generate", partial(self._generate, self._causal.generate)))
        return self

    def _generate(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        ids: Any = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))  # (N, P)
        mask = kwargs.get("attention_mask")
        masks = build_modality_masks(ids, torch.ones_like(ids) if mask is None else mask, **self._ids)
        config, _ = self._causal._prepare_generation_config(**{"generation_config": None, **kwargs})
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ConfigError(f"Attention cannot be measured during {mode.value}: generate greedily or by sampling.")
        self._sets = torch.stack([masks.vision, masks.instruction], dim=-1)  # (prompts, P, 2)
        self._masses: dict[int, list[torch.Tensor]] = {}  # layer -> per token (N, 2)
        self._scored: list[torch.Tensor] = []  # per token (2, N): log-probability and entropy
        self._drawn_from: torch.Tensor | None = None  # (N, vocabulary), distribution of the next token
        with ExitStack() as stack:
            stack.callback(self._attention[0].register_forward_pre_hook(self._begin_step, with_kwargs=True).remove)
            stack.callback(self._causal.register_forward_hook(self._read_logits, with_kwargs=True).remove)
            stack.enter_context(wrap_attention(partial(_attend_and_measure, self._measure, False)))
            outputs = generate(*args, **kwargs)
        sequences: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
        self._score(sequences[:, -1])
        self._drawn_from = None
        made = sequences.size(1) - ids.size(1)  # T; with sharded parameters passes continue until all processes end
        self.logps, self.entropies = torch.stack(self._scored[:made], dim=-1)
        by_layer = [torch.stack(steps[:made], dim=1) for _, steps in sorted(self._masses.items())]  # L of (N, T, 2)
        sides = torch.stack(by_layer)
        counts = self._sets.sum(1).repeat_interleave(len(sequences) // len(ids), dim=0).to(sides.device)  # (N, 2)
        valid = torch.ones(sides.shape[1:3], dtype=torch.bool, device=sides.device)
        self.mass = AttentionMass(sides[..., 0], sides[..., 1], counts[:, 0], counts[:, 1], valid)
        return outputs

    def _begin_step(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens seen; the pass that fills a shared cache samples no token."""
        passing = (args[0] if args else kwargs["hidden_states"]).size(1)
        self._seen = positions_seen(cache_of(kwargs)) + passing
        self._makes_token = self._seen >= self._sets.size(1)
        self._of_keys: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def _measure(self, call: AttentionCall) -> None:
        """Measure the last query of a call."""
        if call.module not in self._modules or not self._makes_token:
            return
        rows, queries, keys, device = call.shape
        if keys not in self._of_keys:
            first = self._seen - keys  # a cache with a window drops earlier keys
            if first < 0:
                raise ConfigError("Attention cannot be measured with a cache of fixed length: use a dynamic one.")
            sets = self._sets.repeat_interleave(rows // len(self._sets), dim=0)[:, first:]  # (N, K', 2)
            columns = call.key.size(-1) - sets.size(-1)  # padding that kernels require, once for all layers
            wide = nn.functional.pad(sets, (0, columns, 0, keys - sets.size(1)))
            self._of_keys[keys] = wide.to(device, call.key.dtype)
        last = Queries(torch.tensor([queries - 1], device=device), queries - 1, queries)
        mass = call.mass_on_keys(self._of_keys[keys], last)[:, 0, : self._sets.size(-1)]  # (N, 2)
        self._masses.setdefault(call.module.layer_idx, []).append(mass)

    @torch.no_grad()
    def _read_logits(self, causal: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if self._makes_token:
            if self._drawn_from is not None:
                self._score(kwargs["input_ids"][:, -1])
            self._drawn_from = torch.log_softmax(outputs.logits[:, -1].float() / self._temperature, dim=-1)

    def _score(self, tokens: torch.Tensor) -> None:
        """Store log-probabilities and entropies of the sampled tokens, (N,)."""
        logps = self._drawn_from
        assert logps is not None
        self._scored.append(torch.stack([logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropies_of(logps)]))
