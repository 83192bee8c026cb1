"""Attention mass measured while transformers generates, from the attention weights that it returns."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationMode

from vgr_trl.batch.signals import AttentionMass
from vgr_trl.errors import ConfigError
from vgr_trl.sharing import replaced
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals.decoder import find_decoder
from vgr_trl.signals.modality import build_modality_masks

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class GenerationProbe:
    """Measures, while it is active, the attention of the tokens that `model.generate` makes.

        with GenerationProbe(model, vision_token_ids=..., special_token_ids=...) as probe:
            model.generate(**inputs)
        probe.mass

    The language model attends eagerly meanwhile, the vision tower as before. All weights of all steps are in memory at
    the end of a generation, L x H x (P x P + T x (P + T)) numbers per row: for long prompts use `AttentionProbe`. Goes
    around `share_prompts`, if both are used: enter it last.

    Args:
        model: transformers model, also wrapped by DDP or PEFT.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.

    Raises:
        ConfigError: the model cannot attend eagerly, or generates with beams, an assistant or a cache of fixed length.
    """

    def __init__(self, model: nn.Module, *, vision_token_ids: Sequence[int], special_token_ids: Sequence[int]) -> None:
        self.causal: Any = causal_model(model)
        self.vision_token_ids, self.special_token_ids = tuple(vision_token_ids), tuple(special_token_ids)
        self._mass: AttentionMass | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "GenerationProbe":
        plain = self.causal.generate

        @wraps(plain)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self._generate(plain, *args, **kwargs)

        self._stack.enter_context(replaced(self.causal, "generate", generate))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def mass(self) -> AttentionMass:
        """Of the latest generation, (L, N, T) with T the longest completion; `mask` counts every token as valid.

        Raises:
            ConfigError: nothing has been generated.
        """
        if self._mass is None:
            raise ConfigError(
                "Nothing has been generated while the probe was active: call model.generate in its block."
            )
        return self._mass

    def _generate(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = self._prompts(args, kwargs)
        wanted = self._config(kwargs)
        with eager_language_model(self.causal):
            outputs = plain(*args, **kwargs | {"output_attentions": True, "return_dict_in_generate": True})
        if not outputs.attentions or not outputs.attentions[0]:
            raise ConfigError(
                f"{type(self.causal).__name__} returned no attention while it generated: measure it by scoring."
            )
        copies = len(outputs.sequences) // len(ids)
        masks = build_modality_masks(
            ids, mask, vision_token_ids=self.vision_token_ids, special_token_ids=self.special_token_ids
        )
        sets = torch.stack([masks.vision, masks.instruction], dim=-1).repeat_interleave(copies, dim=0)  # (N, P, 2)
        self._mass = mass_of_steps(outputs.attentions, sets)
        return outputs if wanted.return_dict_in_generate else outputs.sequences

    def _prompts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise ConfigError("Attention can be measured only where generate is given input_ids, (N, P).")
        mask = kwargs.get("attention_mask")
        return ids, torch.ones_like(ids) if mask is None else mask

    def _config(self, kwargs: dict[str, Any]) -> Any:
        given = dict(kwargs)
        config, _ = self.causal._prepare_generation_config(given.pop("generation_config", None), **given)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in _MODES:
            raise ConfigError(
                f"Attention cannot be measured during {mode.value}: generate greedily or by sampling, or measure it by "
                "scoring."
            )
        return config


@contextmanager
def eager_language_model(model: nn.Module) -> Iterator[None]:
    """Let the language model inside a transformers model attend eagerly for the duration; its vision tower does not.

    Raises:
        ConfigError: its attention cannot be changed.
    """
    decoder: Any = find_decoder(model)
    if not decoder._can_set_attn_implementation():
        raise ConfigError(f"The attention of {type(decoder).__name__} cannot be made eager: measure it by scoring.")
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = "eager"
    try:
        yield
    finally:
        decoder.config._attn_implementation = before


def mass_of_steps(steps: Sequence[Sequence[torch.Tensor | None]], sets: torch.Tensor) -> AttentionMass:
    """Mass of the emitting queries, each the last one of its step.

    Args:
        steps: per new token and layer, (N, H, Q, K) weights; step 0 comes after the P tokens of the prompt.
        sets: (N, P, 2), vision and instruction.
    """
    prompt = sets.size(1)
    of_tokens = []
    for step, layers in enumerate(steps):
        sides = []
        for weights in layers:
            if weights is None:
                continue
            mean = weights[:, :, -1].mean(1, dtype=torch.float32)  # (N, K)
            first = prompt + step - mean.size(1)  # a cache with a window has dropped the keys before
            if first < 0:
                raise ConfigError("Attention cannot be measured with a cache of fixed length: use a dynamic one.")
            keys = sets[:, first:].to(mean)  # (N, K', 2)
            sides.append(torch.einsum("nk,nkc->nc", mean[:, : keys.size(1)], keys))
        of_tokens.append(torch.stack(sides))  # (L, N, 2)
    mass = torch.stack(of_tokens, dim=2)  # (L, N, T, 2)
    counts = sets.sum(1)
    mask = torch.ones(mass.shape[1:3], dtype=torch.bool, device=mass.device)
    return AttentionMass(mass[..., 0], mass[..., 1], counts[:, 0], counts[:, 1], mask)
