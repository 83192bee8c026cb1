"""Similarity of the hidden states that emit tokens to those of the image."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize

from vgr_trl.sharing.model_support import (
    attention_modules,
    causal_model,
)
from vgr_trl.signals.plan import Pass, PassPlan
from vgr_trl.signals.probe import find_decoder
from vgr_trl.utils import ConfigError


def cosine_similarity(emitting: torch.Tensor, image: torch.Tensor, over: str) -> torch.Tensor:
    """Return how similar each of T hidden states is to those of an image, (T,) float32 in [-1, 1].

    Args:
        emitting: (T, D), of the positions that emit tokens.
        image: (V, D), of the image tokens; V = 0: all is undefined, NaN.
        over: `max` or `mean` of the V cosines, or `centre`: the cosine to the mean of the V states.
    """
    if not len(image):
        return torch.full((len(emitting),), torch.nan, device=emitting.device)
    states, others = normalize(emitting.float(), dim=-1), image.float()
    if over == "centre":
        return states @ normalize(others.mean(0), dim=0)
    others = normalize(others, dim=-1)
    return (states @ others.T).amax(1) if over == "max" else states @ others.mean(0)


class SimilarityProbe:
    """Measures, while it is active, `cosine_similarity` of the positions that emit completions.

        with SimilarityProbe(model, vision) as probe:
            model(**inputs)
        probe.similarity

    The batch may pass in several calls of consecutive rows, and with its prompts shared; then the states of an image
    are those of the pass over the prompts.

    Args:
        model: transformers model, also wrapped.
        vision: (N, P) bool, image tokens of the prompts.
        layer: which hidden states, in [-L - 1, L].
        over: as `cosine_similarity` takes it.

    Raises:
        ConfigError: the model has no such hidden states.
    """

    def __init__(self, model: nn.Module, vision: torch.Tensor, layer: int = -1, over: str = "max") -> None:
        self.vision, self.over = vision, over
        self._plan = PassPlan(vision.unsqueeze(-1), None, measure_prompt=False)
        self._base: Any = causal_model(model).base_model
        self._decoder = find_decoder(model)
        self._attention = attention_modules(self._decoder)[0]
        layers = decoder_layers(self._decoder)
        self._number = hidden_state_number(layer, len(layers))
        self._read = self._decoder if self._number == len(layers) else layers[max(self._number - 1, 0)]
        self._images: tuple[Pass, list[torch.Tensor]] | None = None  # of prompts whose completions are still to come
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
            raise ConfigError(
                f"{type(module).__name__} returns states of shape {tuple(states.shape)} where {current.shape[1]} "
                f"positions in {current.shape[0]} rows pass: give another hidden_similarity_layer, such as -1."
            )
        if not current.seen:
            own = self.vision[current.owners].to(states.device)  # (B, P)
            width = min(own.size(1), states.size(1))
            images = [row[:width][seen[:width]] for row, seen in zip(states, own, strict=True)]
            self._images = current, images
        if current.emitting is None:
            return
        assert self._images is not None
        prompts, images = self._images
        emitting = states[:, current.emitting.index]  # (B, T', D)
        numbers = [prompts.index_of(row) for row in current.numbers]
        values = [
            cosine_similarity(row, images[number], self.over)
            for row, number in zip(emitting, numbers, strict=True)
            if number is not None
        ]
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
        raise ConfigError(
            f"hidden_similarity_layer is {layer}, but the model has {layers} layers: give a number in "
            f"[{-layers - 1}, {layers}], where 0 is what goes into the first and {layers} or -1 the last."
        )
    return layer % (layers + 1)
