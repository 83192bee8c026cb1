"""Attention mass of emitting queries, measured during a forward pass with whatever attention kernel it uses.

The mass on a set of keys is the attention output for a value vector that is 1 on the set and 0 elsewhere. While a probe
is active, every attention call of the language model runs as always, and then once more for the queries of interest,
with two indicator columns as values. No (H, T, S) matrix is made, unless the model itself makes one (eager attention).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from vgr_trl.batch.signals import AttentionMass
from vgr_trl.errors import ConfigError
from vgr_trl.sharing.backbone import attention_wrapped, causal_model, has_active_dropout, is_attention, layer_index
from vgr_trl.signals.attention.passes import Pass, PassPlan
from vgr_trl.signals.attention.second_call import AttentionCall, AttentionWeights
from vgr_trl.signals.decoder import find_decoder, refuse_unmeasurable
from vgr_trl.signals.modality import ModalityMasks


class AttentionProbe:
    """Measures, while it is active, how much attention the queries of a batch pay to vision and instruction tokens.

        with AttentionProbe(model, masks) as probe:
            model(**inputs)
        probe.mass

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
        packed: a row may be several sequences, whose positions start anew; `masks` are then of whole sequences.

    Raises:
        ConfigError: the attention of the model cannot be measured, or other rows or positions pass through it than
            were announced.
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
    ) -> None:
        refuse_unmeasurable(model)
        sets = [masks.vision, masks.instruction, masks.region]
        self.sets = torch.stack([each for each in sets if each is not None], dim=-1)  # (N, P or S, 2, with a region 3)
        count = len(self.sets)
        if any(not 0 <= row < count for row in keep_rows):
            raise ConfigError(f"keep_rows of the probe is {list(keep_rows)}: give rows in [0, {count}).")
        self.plan = PassPlan(self.sets, rows, measure_prompt)
        self.keep_rows, self.packed = tuple(keep_rows), packed
        self._base: Any = causal_model(model).base_model
        self._decoder: Any = find_decoder(model)
        self._attention = [module for module in self._decoder.modules() if is_attention(module)]
        numbers = sorted({index for module in self._attention if (index := layer_index(module)) is not None})
        self._kept_layers = set(numbers if keep_layers is None else map(numbers.__getitem__, keep_layers))
        self._modules = {module for module in self._decoder.modules() if layer_index(module) is not None}
        self._masses: dict[int, torch.Tensor] = {}  # layer -> (N, T, 2)
        self._prompts: dict[int, torch.Tensor] = {}  # layer -> (N, 2), sums over instruction queries
        self._maps: dict[tuple[int, int], torch.Tensor] = {}  # (row, layer) -> (T, V)
        self._stack = ExitStack()

    def __enter__(self) -> "AttentionProbe":
        for module, hook in ((self._base, self.plan.begin_batch), (self._attention[0], self.plan.begin_pass)):
            self._stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module in self._attention:
            self._stack.callback(module.register_forward_hook(self._take_weights).remove)
        self._stack.enter_context(attention_wrapped(self._wrap))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def mass(self) -> AttentionMass:
        """What was measured, (L, N, T), with the layers that have attention; `mask` counts every token as valid.

        Raises:
            ConfigError: fewer rows have passed through the model than `masks` has.
        """
        self._refuse_unfinished()
        sides = self._by_layer(self._masses)[:, :, self.plan.picks]  # (L, N, T, 2)
        return self._as_mass(sides, torch.ones(sides.shape[1:3], dtype=torch.bool, device=sides.device))

    @property
    def prompt_mass(self) -> AttentionMass:
        """The mean over the queries of a row's instruction tokens, (L, N, 1); of no use for rows without any.

        Each query sees what comes before it: one in front of the image pays it no attention.

        Raises:
            ConfigError: as `mass`, or `measure_prompt` is off.
        """
        self._refuse_unfinished()
        if not self.plan.measure_prompt:
            raise ConfigError("measure_prompt of the probe is off: switch it on for prompt_mass.")
        queries = self.sets[..., 1].sum(1)  # (N,)
        sums = self._by_layer(self._prompts).unsqueeze(2)  # (L, N, 1, 2)
        return self._as_mass(sums / queries.clamp(min=1)[:, None, None], (queries > 0).unsqueeze(1))

    @property
    def kept(self) -> dict[int, torch.Tensor]:
        """Row -> (L, T, V) float32, attention over its vision tokens, for rows and layers of which it is kept."""
        self._refuse_unfinished()
        layers = sorted(self._kept_layers & set(self._masses))
        return {
            row: torch.stack([self._maps[row, layer] for layer in layers])[:, self.plan.picks] for row in self.keep_rows
        }

    def _refuse_unfinished(self) -> None:
        if self.plan.next_row != len(self.sets):
            raise ConfigError(
                f"The probe has masks for {len(self.sets)} rows, but {self.plan.next_row} have passed through the "
                "model: pass the whole batch while it is active."
            )
        if not self._masses:
            raise ConfigError(
                f"{type(self._decoder).__name__} neither looks up its attention in the registry of transformers nor "
                "returns its weights: load the model with attn_implementation='eager'."
            )

    def _by_layer(self, values: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.stack([values[layer].to(self.sets.device) for layer in sorted(values)])

    def _as_mass(self, sides: torch.Tensor, mask: torch.Tensor) -> AttentionMass:
        counts = self.sets.sum(1)  # (N, 2)
        region = (sides[..., 2], counts[:, 2]) if sides.size(-1) == 3 else ()
        own = sides[..., 0], sides[..., 1], counts[:, 0], counts[:, 1]
        return AttentionMass(*own, mask.to(sides.device), *region)

    # The attention calls of a pass

    def _wrap(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def measured(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = attention(module, query, key, value, *args, **kwargs)
            if (at_hand := self._due(module)) is not None:
                options = dict(zip(("attention_mask",), args, strict=False)) | kwargs
                if outputs[1] is None or options.get("dropout"):
                    self._measure(module, at_hand, AttentionCall(attention, module, query, key, options, self.packed))
                else:
                    self._measure(module, at_hand, AttentionWeights(outputs[1]))
            return outputs

        return measured

    def _take_weights(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Measure a layer that calls no function of the registry, by the matrix that it returns."""
        weights = outputs[1] if isinstance(outputs, tuple) and len(outputs) > 1 else None
        if isinstance(weights, torch.Tensor) and weights.ndim == 4 and (at_hand := self._due(module)) is not None:
            if has_active_dropout(module):
                raise ConfigError(
                    f"{type(module).__name__} has dropout in the attention that it returns: switch it off to measure."
                )
            self._measure(module, at_hand, AttentionWeights(weights))

    def _due(self, module: nn.Module) -> Pass | None:
        """The pass at hand, if the attention of `module` is still to be measured in it."""
        at_hand = self.plan.current
        if at_hand is None or module not in self._modules or layer_index(module) in at_hand.done:
            return None
        return at_hand

    @torch.no_grad()
    def _measure(self, module: nn.Module, at_hand: Pass, call: AttentionCall | AttentionWeights) -> None:
        layer = layer_index(module)
        assert layer is not None
        at_hand.done.add(layer)
        rows, queries, num_keys = call.shape
        device = call.device
        sets = at_hand.sets_of_keys(self.sets, (rows, queries), num_keys).to(device)  # (B, K, 2)
        if layer not in self._masses:
            self._masses[layer] = torch.zeros(len(self.sets), len(self.plan.positions), sets.size(-1), device=device)
            self._prompts[layer] = torch.zeros(len(self.sets), sets.size(-1), device=device)
        if at_hand.emitting is not None:
            self._masses[layer][at_hand.rows, at_hand.columns] = at_hand.expand_to_rows(
                call.mass_on_keys(sets, at_hand.emitting)
            )
            for row in self.keep_rows if layer in self._kept_layers else ():
                if (index := at_hand.index_of(row)) is not None:
                    self._keep_map(row, layer, at_hand, sets[index : index + 1], call, index)
        if at_hand.instruction is not None:
            mass = call.mass_on_keys(sets, at_hand.instruction)  # (B, P', 2)
            own = at_hand.instruction_rows(self.sets).to(device)  # (B, P')
            sums = at_hand.expand_to_rows((mass * own.unsqueeze(-1)).sum(1))
            before = self._prompts[layer][at_hand.rows] if at_hand.seen else 0
            self._prompts[layer][at_hand.rows] = before + sums

    def _keep_map(
        self,
        row: int,
        layer: int,
        at_hand: Pass,
        sets: torch.Tensor,
        call: AttentionCall | AttentionWeights,
        index: int,
    ) -> None:
        assert at_hand.emitting is not None
        keys = sets[0, :, 0].nonzero().flatten()  # (V',)
        each = torch.nn.functional.one_hot(keys, sets.size(1)).T.unsqueeze(0)  # (1, K, V')
        attention = call.mass_on_keys(each, at_hand.emitting, slice(index, index + 1))[0]  # (T', V')
        vision = int(self.sets[row, :, 0].sum())
        if (row, layer) not in self._maps:
            self._maps[row, layer] = torch.zeros(len(self.plan.positions), vision, device=sets.device)
        # Keys that a cache with a window has dropped are the first ones, and get no attention.
        self._maps[row, layer][at_hand.columns, vision - len(keys) :] = attention
