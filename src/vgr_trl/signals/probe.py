"""Attention on the image and the instruction, and similarity to the image, measured while a model computes.

The mass on a set of keys is the attention output for a value vector that is 1 on the set and 0 elsewhere. While an
`AttentionProbe` is active, every attention call of the language model runs as always, and then once more for the
queries of interest, with indicator columns as values. No (H, T, S) matrix is made, except by eager attention.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    causal_model,
    indexed_modules,
    is_compiled,
    why_adapter_reads_whole_rows,
)
from vgr_trl.signals.plan import Pass, PassPlan, Queries, cache_of, positions_seen
from vgr_trl.signals.ratios import AttentionMass, ModalityMasks, build_modality_masks, entropies_of

SUPPORTED = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


def find_decoder(model: nn.Module) -> Any:
    """Return the language model of a transformers model, also a wrapped one (DDP, DeepSpeed, PEFT)."""
    inside: Any = causal_model(model)
    decoder = inside.get_decoder() if hasattr(inside, "get_decoder") else None
    return inside if decoder is None else decoder


def count_attention_layers(model: nn.Module) -> int:
    """Return L, the layers of the language model that have attention; layers of another kind are not measured."""
    return len({module.layer_idx for module in attention_modules(find_decoder(model))})


def why_not_measurable(model: nn.Module) -> str | None:
    """Return why the attention of `model` cannot be measured, None if it can."""
    if is_compiled(model):
        return "the model is compiled, and a compiled pass calls no other attention; switch torch.compile off."
    if (adapter := why_adapter_reads_whole_rows(model)) is not None:
        return f"the model has an adapter of the type {adapter}; use another type."
    if getattr(causal_model(model).config, "is_encoder_decoder", False):
        return f"{type(causal_model(model)).__name__} has an encoder for prompts; use a decoder-only model."
    decoder = find_decoder(model)
    used = getattr(getattr(decoder, "config", None), "_attn_implementation", None)
    if used not in SUPPORTED:
        return f"the attention implementation is {used!r}; load the model with one of {', '.join(SUPPORTED)}."
    can_change: Any = getattr(decoder, "_can_set_attn_implementation", None)
    if can_change is not None and not can_change():
        return f"{type(decoder).__name__} does not use the attention registry of transformers; use another model."
    if not count_attention_layers(model):
        return f"{type(decoder).__name__} has no attention layers with a layer_idx."
    return None


class AttentionProbe:
    """Measures, while it is active, how much attention the queries of a batch pay to vision and instruction tokens.

    Example:
        >>> model, processor = build_tiny_vlm([])  # of vgr_trl.demo.tiny_model
        >>> text = "<|vision_start|><|image_pad|><|vision_end|>which colour is it?"
        >>> inputs = processor(text=[text], images=[Image.new("RGB", (56, 56), "red")], return_tensors="pt")
        >>> tokens = {"vision_token_ids": vision_token_ids(model), "special_token_ids": special_token_ids(processor)}
        >>> masks = build_modality_masks(inputs.input_ids, inputs.attention_mask, **tokens)
        >>> with AttentionProbe(model, masks) as probe:
        ...     _ = model(**inputs)
        >>> vision_gain_ratio(probe.mass).shape
        torch.Size([1])

    The batch may pass through the model in several calls of consecutive rows, with gradient checkpointing, and with its
    prompts shared (`share_prompts`). What the model returns is what it returns without a probe.

    Args:
        model: transformers model, also wrapped, with sdpa, flash or eager attention.
        masks: of the prompts (N, P), or of whole sequences (N, S).
        rows: query positions to measure: a slice, or a sequence of integers. None: with masks (N, P) the emitting rows
            of the completion, P - 1 to S - 2; with masks of whole sequences all S.
        keep_rows: rows of the batch whose attention over the vision tokens is kept: `kept[row]` is (L, T, V) float32,
            the mean over heads, with V the vision tokens of that row in order.
        keep_layers: of the L layers with attention, those whose attention is kept; None: all.
        measure_prompt: measure the queries of the instruction tokens too, for `prompt_mass`.
        packed: a row may be several sequences, whose positions start again at 0; `masks` are then of whole sequences.
        prompt: P, if `masks` are of whole sequences and `rows` is None: the emitting rows are measured all the same.

    Raises:
        ConfigError: the attention of the model cannot be measured, or other rows or positions pass through it than
            `masks` has.
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
        if (why := why_not_measurable(model)) is not None:
            raise ConfigError(f"Attention cannot be measured: {why}")
        sets = [each for each in (masks.vision, masks.instruction, masks.region) if each is not None]
        self.sides = len(sets)  # 2, with a region 3; each image is one more set
        images = () if masks.images is None else masks.images.unbind(-1)
        self.sets = torch.stack([*sets, *images], dim=-1)  # (N, P or S, C)
        self.plan = PassPlan(self.sets, rows, measure_prompt, prompt)
        self.keep_rows, self.packed = tuple(keep_rows), packed
        self._base: Any = causal_model(model).base_model
        decoder = find_decoder(model)
        self._attention = attention_modules(decoder)
        numbers = sorted({module.layer_idx for module in self._attention})
        self._kept_layers = set(numbers if keep_layers is None else map(numbers.__getitem__, keep_layers))
        self._modules = set(indexed_modules(decoder))
        self._masses: dict[int, torch.Tensor] = {}  # layer -> (N, T, 2)
        self._prompts: dict[int, torch.Tensor] = {}  # layer -> (N, 2), sums over instruction queries
        self._maps: dict[tuple[int, int], torch.Tensor] = {}  # (row, layer) -> (T, V)
        self._stack = ExitStack()

    def __enter__(self) -> "AttentionProbe":
        self.plan.hook(self._stack, self._base, self._attention[0])
        # A hook on the last layer makes shared prompts run it, too.
        self._stack.callback(self._attention[-1].register_forward_hook(lambda *call: None).remove)
        self._stack.enter_context(wrap_attention(self._wrap))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def mass(self) -> AttentionMass:
        """Attention mass (L, N, T) of the layers that have attention; `mask` counts every token as valid.

        Raises:
            ConfigError: fewer rows have passed through the model than `masks` has.
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
        """The mean over the queries of a row's instruction tokens, (L, N, 1), with `measure_prompt`.

        Each query sees what comes before it: one in front of the image pays it no attention. A row without instruction
        tokens has no valid token.

        Raises:
            ConfigError: as `mass`.
        """
        sets = self.sets[:, : self.plan.prompt]
        queries = sets[..., 1].sum(1)  # (N,)
        sums = self._stack_layers(self._prompts).unsqueeze(2)  # (L, N, 1, 2)
        return self._to_mass(sums / queries.clamp(min=1)[:, None, None], (queries > 0).unsqueeze(1), sets)

    @property
    def kept(self) -> dict[int, torch.Tensor]:
        """Row -> (L, T, V) float32, attention over its vision tokens, for rows and layers of which it is kept."""
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

    def _wrap(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """Return an attention function that measures its calls."""

        def measured(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            options = dict(zip(("attention_mask",), args, strict=False)) | kwargs
            outputs = attention(module, query, key, value, *args, **kwargs)
            self._measure(module, AttentionCall(attention, module, query, key, options, self.packed))
            return outputs

        return measured

    @torch.no_grad()
    def _measure(self, module: Any, call: "AttentionCall") -> None:
        current = self.plan.current
        if current is None or module not in self._modules or module.layer_idx in current.done:
            return
        layer = module.layer_idx
        current.done.add(layer)
        *queries, num_keys, device = call.shape
        sets = current.sets_of_keys(self.sets, tuple(queries), num_keys, device)  # (B, K, 2)
        numbers, groups = (index.to(device) for index in current.indices)
        if layer not in self._masses:
            self._masses[layer] = torch.zeros(len(self.sets), len(self.plan.positions), sets.size(-1), device=device)
            self._prompts[layer] = torch.zeros(len(self.sets), sets.size(-1), device=device)
        if current.emitting is not None:
            self._masses[layer][numbers, current.columns] = call.mass_on_keys(sets, current.emitting)[groups]
            for row in set(self.keep_rows) & set(current.numbers) if layer in self._kept_layers else ():
                index = current.groups[current.numbers.index(row)]
                keys = sets[index, :, 0].nonzero().flatten()  # (V',)
                each = torch.nn.functional.one_hot(keys, num_keys).T.unsqueeze(0)  # (1, K, V')
                vision = int(self.sets[row, :, 0].sum())
                if (row, layer) not in self._maps:
                    self._maps[row, layer] = torch.zeros(len(self.plan.positions), vision, device=device)
                attention = call.mass_on_keys(each, current.emitting, slice(index, index + 1))[0]  # (T', V')
                # Keys that a cache with a window has dropped are the first ones, and get no attention.
                self._maps[row, layer][current.columns, vision - len(keys) :] = attention
        if current.instruction is not None:
            mass = call.mass_on_keys(sets, current.instruction)  # (B, P', 2)
            positions = current.instruction.index.to(self.sets.device) + current.seen
            own = self.sets[current.owners.to(self.sets.device)][:, positions, 1].to(device)  # (B, P')
            sums = (mass * own.unsqueeze(-1)).sum(1)[groups]
            self._prompts[layer][numbers] = sums + (self._prompts[layer][numbers] if current.seen else 0)


@dataclass(frozen=True)
class AttentionCall:
    """One call of a registered attention function, and how much of its attention goes to sets of keys.

    Attributes:
        function: as transformers registers it.
        module: attention module that it was called for.
        query: (B, H, Q, D).
        key: (B, H of keys, K, D).
        options: the other arguments of the call; `attention_mask` among them is (B or 1, 1 or H, Q, K), for flash
            attention (B, K), or None.
        packed: several sequences may stand in one row, which flash attention separates by their positions: the
            function runs again for all queries.
    """

    function: Callable[..., Any]
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    options: dict[str, Any]
    packed: bool = False

    @property
    def shape(self) -> tuple[int, int, int, torch.device]:
        """B, Q and K, and the device."""
        return self.query.size(0), self.query.size(2), self.key.size(2), self.key.device

    def mass_on_keys(self, sets: torch.Tensor, queries: Queries, rows: slice = slice(None)) -> torch.Tensor:
        """Return the attention on sets of keys, the mean over heads, (B', T', C) float32.

        Args:
            sets: (B', K, C) of ones and zeros, for B' of the B rows.
            queries: the queries of interest, T' of Q.
            rows: which of the B rows.
        """
        width = self.key.size(-1)  # fused kernels want values as wide as keys
        return torch.cat([self._outputs(part, queries, rows) for part in sets.split(width, dim=-1)], dim=-1)

    def _outputs(self, sets: torch.Tensor, queries: Queries, rows: slice) -> torch.Tensor:
        """Run the function on at most D sets: (B', T', C)."""
        key, query, options = self.key, self.query, {**self.options, "dropout": 0.0}
        flash = "flash" in (getattr(self.module.config, "_attn_implementation", None) or "")
        if not self.packed:
            # Causal kernels align the last query with the last key, so the keys end with those of the last query.
            last = queries.stop if self._is_causal() else query.size(2)
            stop = key.size(2) - query.size(2) + last
            chosen = slice(queries.first, last) if flash else queries.index  # flash needs them without gaps
            key, query, sets = key[rows, :, :stop], query[rows, :, chosen], sets[:, :stop]
            options = self._options(chosen, stop, rows, flash)
        values = sets.to(key.dtype)
        if (missing := key.size(-1) - sets.size(-1)) > 0:
            values = torch.nn.functional.pad(values, (0, missing))  # (B', K', D)
        values = values.unsqueeze(1).expand(-1, key.size(1), -1, -1)
        mask = options.pop("attention_mask", None)
        outputs, _ = self.function(self.module, query, key, values, mask, **options)  # (B', T' or more, H, D)
        mass: torch.Tensor = outputs[..., : sets.size(-1)].mean(2, dtype=torch.float32)
        if self.packed:
            return mass[rows, queries.index]
        return mass[:, queries.index - queries.first] if flash else mass

    def _options(self, chosen: slice | torch.Tensor, stop: int, rows: slice, flash: bool) -> dict[str, Any]:
        """Return the arguments for some rows and queries, and the keys up to `stop`."""
        if any(self.options.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")):
            raise ConfigError("Attention cannot be measured in packed sequences: pass one sequence per row, padded.")
        left_out = "position_ids", "output_attentions"
        kept = {name: value for name, value in self.options.items() if name not in left_out}
        for name in ("attention_mask", "position_bias"):
            if (per_query := kept.get(name)) is not None and per_query.ndim == 4:
                of_rows = per_query[rows] if per_query.size(0) > 1 else per_query
                kept[name] = of_rows[:, :, chosen, :stop]
        mask = kept.get("attention_mask")
        if mask is None and not flash and self._is_causal():  # what the function does by itself for all queries
            before, device = self.key.size(2) - self.query.size(2), self.key.device
            position = torch.arange(before, self.key.size(2), device=device)[chosen]  # (T',)
            kept["attention_mask"] = (position.unsqueeze(1) >= torch.arange(stop, device=device))[None, None]
        elif mask is not None and mask.ndim == 2:
            kept["attention_mask"] = mask[rows, :stop]
        return {**kept, "dropout": 0.0}

    def _is_causal(self) -> bool:
        """Whether no query sees what comes behind it, by the kernel's own rule; a mask may say otherwise."""
        mask = self.options.get("attention_mask")
        causal = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if causal is None else causal
        return bool(causal) and self.query.size(2) > 1 and (mask is None or mask.ndim == 2)


def cosine_similarity(
    emitting: torch.Tensor, image: torch.Tensor, over: str, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return how similar each of T hidden states is to those of an image, (T,) float32 in [-1, 1].

    Args:
        emitting: (T, D), of the positions that emit tokens.
        image: (V, D), of the image tokens; V = 0: all is undefined, NaN.
        over: `max` or `mean` of the V cosines, or `centre`: the cosine to the mean of the V states.
        seen: (T,) how many of the V states each position sees, the first ones; None: all.
    """
    if not len(image):
        return torch.full((len(emitting),), torch.nan, device=emitting.device)
    if seen is None:
        seen = torch.full((len(emitting),), len(image), device=emitting.device)
    states, others = normalize(emitting.float(), dim=-1), image.float()
    ranks = torch.arange(1, len(others) + 1, device=others.device)  # (V,)
    if over == "centre":
        others = others.cumsum(0) / ranks.unsqueeze(1)
    found = states @ normalize(others, dim=-1).T  # (T, V)
    if over != "centre":
        found = found.cummax(1).values if over == "max" else found.cumsum(1) / ranks
    found = found.gather(1, (seen - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return found.masked_fill(seen == 0, torch.nan)


class SimilarityProbe:
    """Measures, while it is active, `cosine_similarity` of the positions that emit completions.

        with SimilarityProbe(model, vision) as probe:
            model(**inputs)
        probe.similarity

    The batch may pass in several calls of consecutive rows, and with its prompts shared; then the states of an image
    are those of the pass over the prompts.

    Args:
        model: transformers model, also wrapped.
        vision: (N, P) bool, image tokens of the prompts; with `prompt` (N, S), those of whole rows.
        layer: which hidden states, in [-L - 1, L].
        over: as `cosine_similarity` takes it.
        prompt: P, where completions hold images: each position is compared with those before it.

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
        self.vision, self.over = vision, over
        self._plan = PassPlan(vision.unsqueeze(-1), None, measure_prompt=False, prompt=prompt)
        self._seen = None if prompt is None else vision.cumsum(1)  # (N, S)
        self._base: Any = causal_model(model).base_model
        self._decoder = find_decoder(model)
        self._attention = attention_modules(self._decoder)[0]
        layers = decoder_layers(self._decoder)
        self._number = hidden_state_number(layer, len(layers))
        self._read = self._decoder if self._number == len(layers) else layers[max(self._number - 1, 0)]
        self._images: dict[int, torch.Tensor] = {}  # row -> (V, D), of the rows that pass or are still to come
        self._found: list[tuple[Pass, torch.Tensor]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "SimilarityProbe":
        self._plan.hook(self._stack, self._base, self._attention)
        self._stack.callback(self._read.register_forward_hook(self._measure, with_kwargs=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def similarity(self) -> torch.Tensor:
        """(N, T) float32; NaN for rows without an image.

        Raises:
            ConfigError: fewer rows have passed through the model than `vision` has.
        """
        self._plan.check_complete()
        result = torch.full((len(self.vision), len(self._plan.positions)), torch.nan, device=self.vision.device)
        for current, values in self._found:
            result[current.numbers, current.columns] = values.to(result.device)
        return result

    @torch.no_grad()
    def _measure(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        current = self._plan.current
        if current is None or self._number in current.done:
            return
        current.done.add(self._number)
        if self._number == 0:
            states = args[0] if args else kwargs["hidden_states"]  # (B, Q, D)
        else:
            states = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        if states.shape[:2] != current.shape:
            shapes = f"{tuple(states.shape)} instead of {current.shape}"
            raise ConfigError(f"The hidden states have the shape {shapes}: give another hidden_similarity_layer.")
        own = self.vision[current.owners.to(self.vision.device), current.seen :].to(states.device)  # (B, P or less)
        width = min(own.size(1), states.size(1))
        images = [row[:width][seen[:width]] for row, seen in zip(states, own, strict=True)]
        before = self._images if current.seen else {}  # those of the prompts, which have passed
        passed = {row: images[group] for row, group in zip(current.numbers, current.groups, strict=True)}
        found = {row: torch.cat([before[row], image]) if row in before else image for row, image in passed.items()}
        self._images = self._images | found if current.seen else found
        if current.emitting is not None:
            emitting = states[:, current.emitting.index]  # (B, T', D)
            positions, values = self._plan.positions[current.columns], []
            for row, group in zip(current.numbers, current.groups, strict=True):
                seen = None if self._seen is None else self._seen[row, positions].to(emitting.device)
                values.append(cosine_similarity(emitting[group], found[row], self.over, seen))
            self._found.append((current, torch.stack(values)))


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers of a language model.

    Raises:
        ConfigError: it keeps them otherwise than in a list.
    """
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and attention_modules(module):
            return module
    raise ConfigError(f"{type(decoder).__name__} has no list of layers: hidden states cannot be compared.")


def hidden_state_number(layer: int, layers: int) -> int:
    """Return a number in [0, L] for one in [-L - 1, L].

    Raises:
        ConfigError: it is outside of that.
    """
    if not -layers - 1 <= layer <= layers:
        accepted = f"a number in [{-layers - 1}, {layers}], 0 for the embeddings"
        raise ConfigError(f"hidden_similarity_layer is {layer}, the model has {layers} layers: give {accepted}.")
    return layer % (layers + 1)


class GenerationProbe:
    """Measures, while it is active, the tokens that `model.generate` makes, each in the pass that makes it.

        with GenerationProbe(model, vision_token_ids=..., special_token_ids=...) as probe:
            model.generate(**inputs)
        probe.mass, probe.logps, probe.entropies

    Goes around `share_prompts`, if both are used: enter it last.

    Args:
        model: transformers model, also wrapped by DDP or PEFT.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        temperature: logits are divided by it.

    Attributes:
        logps: (N, T) float32, log-probabilities of the tokens of the latest generation under the model's own
            distribution, whatever `top_p` and the like leave of it.
        entropies: (N, T) float32, of that distribution, in nats.

    Raises:
        ConfigError: the attention of the model cannot be measured, or it generates with beams, an assistant or a cache
            of fixed length.
    """

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
        if (why := why_not_measurable(model)) is not None:
            raise ConfigError(f"Attention cannot be measured: {why}")
        self.causal: Any = causal_model(model)
        decoder = find_decoder(model)
        self._attention, self._modules = attention_modules(decoder), set(indexed_modules(decoder))
        self._ids = {"vision_token_ids": vision_token_ids, "special_token_ids": special_token_ids}
        self._temperature = temperature
        self._mass: AttentionMass | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "GenerationProbe":
        generate = partial(self._generate, self.causal.generate)
        self._stack.enter_context(patched_method(self.causal, "generate", generate))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def mass(self) -> AttentionMass:
        """Attention mass of the latest generation, (L, N, T); `mask` counts every token as valid.

        Raises:
            ConfigError: nothing has been generated.
        """
        if self._mass is None:
            raise ConfigError("Nothing was generated while the probe was active: call generate in its block.")
        return self._mass

    def _generate(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        ids: Any = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))  # (N, P)
        mask = kwargs.get("attention_mask")
        masks = build_modality_masks(ids, torch.ones_like(ids) if mask is None else mask, **self._ids)
        config, _ = self.causal._prepare_generation_config(**{"generation_config": None, **kwargs})
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ConfigError(f"Attention cannot be measured during {mode.value}: generate greedily or by sampling.")
        self._sets = torch.stack([masks.vision, masks.instruction], dim=-1)  # (prompts, P, 2)
        self._masses: dict[int, list[torch.Tensor]] = {}  # layer -> per token (N, 2)
        self._scored: list[torch.Tensor] = []  # per token (2, N): log-probability and entropy
        self._drawn_from: torch.Tensor | None = None  # (N, vocabulary), of the token that is drawn next
        with ExitStack() as stack:
            hook = self._attention[0].register_forward_pre_hook(self._begin_step, with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(self.causal.register_forward_hook(self._read_logits, with_kwargs=True).remove)
            stack.enter_context(wrap_attention(self._wrap))
            outputs = generate(*args, **kwargs)
        sequences: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
        self._score(sequences[:, -1])
        self._drawn_from = None
        made = sequences.size(1) - ids.size(1)  # T; with sharded parameters, passes go on until all processes end
        self.logps, self.entropies = torch.stack(self._scored[:made], dim=-1)
        by_layer = [torch.stack(steps[:made], dim=1) for _, steps in sorted(self._masses.items())]  # L of (N, T, 2)
        sides = torch.stack(by_layer)
        counts = self._sets.sum(1).repeat_interleave(len(sequences) // len(ids), dim=0).to(sides.device)  # (N, 2)
        valid = torch.ones(sides.shape[1:3], dtype=torch.bool, device=sides.device)
        self._mass = AttentionMass(sides[..., 0], sides[..., 1], counts[:, 0], counts[:, 1], valid)
        return outputs

    def _begin_step(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before tokens pass: number the new token that comes of them; the pass that fills a shared cache has none."""
        passing = (args[0] if args else kwargs["hidden_states"]).size(1)
        self._seen = positions_seen(cache_of(kwargs)) + passing
        self._makes_token = self._seen >= self._sets.size(1)
        self._of_keys: dict[int, torch.Tensor] = {}

    def _wrap(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """Return an attention function that measures the last query of its calls."""

        def measured(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = attention(module, query, key, value, *args, **kwargs)
            if module in self._modules and self._makes_token:
                options = dict(zip(("attention_mask",), args, strict=False)) | kwargs
                self._measure(module, AttentionCall(attention, module, query, key, options))
            return outputs

        return measured

    @torch.no_grad()
    def _measure(self, module: Any, call: AttentionCall) -> None:
        rows, queries, keys, device = call.shape
        if keys not in self._of_keys:
            first = self._seen - keys  # a cache with a window has dropped the keys before
            if first < 0:
                raise ConfigError("Attention cannot be measured with a cache of fixed length: use a dynamic one.")
            sets = self._sets.repeat_interleave(rows // len(self._sets), dim=0)[:, first:]  # (N, K', 2)
            columns = call.key.size(-1) - sets.size(-1)  # those that kernels want, once for all layers
            wide = nn.functional.pad(sets, (0, columns, 0, keys - sets.size(1)))
            self._of_keys[keys] = wide.to(device, call.key.dtype)
        last = Queries(torch.tensor([queries - 1], device=device), queries - 1, queries)
        mass = call.mass_on_keys(self._of_keys[keys], last)[:, 0, : self._sets.size(-1)]  # (N, 2)
        self._masses.setdefault(module.layer_idx, []).append(mass)

    @torch.no_grad()
    def _read_logits(self, causal: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if self._makes_token:
            if self._drawn_from is not None:
                self._score(kwargs["input_ids"][:, -1])
            self._drawn_from = torch.log_softmax(outputs.logits[:, -1].float() / self._temperature, dim=-1)

    def _score(self, tokens: torch.Tensor) -> None:
        """Take the log-probability of the tokens (N,) that were drawn."""
        logps = self._drawn_from
        assert logps is not None
        self._scored.append(torch.stack([logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropies_of(logps)]))
