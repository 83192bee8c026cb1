"""What of a model computes image features: whether it trains, whether it draws, and whether it has changed."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any
from weakref import ref

import torch
from torch import nn

from vgr_trl.sharing.backbone import has_active_dropout


def parts_of_tower(base: Any) -> list[nn.Module]:
    """The modules of a base model beside its decoder: vision tower and merger."""
    decoder = getattr(base, "language_model", None)
    return [] if decoder is None else [module for module in base.children() if module is not decoder]


def parameters_of_tower(base: Any) -> Iterator[nn.Parameter]:
    """Those of the modules, and those that the base model itself has (the newline of LLaVA-NeXT)."""
    own = base.parameters(recurse=False)
    return chain(own, chain.from_iterable(part.parameters() for part in parts_of_tower(base)))


def tower_trains(base: Any) -> bool:
    """Whether a parameter of tower or merger gets a gradient, adapters included."""
    return any(parameter.requires_grad for parameter in parameters_of_tower(base))


def tower_draws(base: Any) -> bool:
    """Whether dropout is at work in tower or merger while training."""
    return any(has_active_dropout(part, when_training=True) for part in parts_of_tower(base))


def _adapters(base: Any) -> tuple[Hashable, ...]:
    """Which adapters of the tower are at work."""
    modules = chain.from_iterable(part.modules() for part in parts_of_tower(base))
    return tuple(
        (module.disable_adapters, str(module.active_adapter))
        for module in modules
        if hasattr(module, "disable_adapters") and hasattr(module, "active_adapter")
    )


@dataclass(frozen=True)
class _Tower:
    base: Callable[[], Any]  # weak
    adapters: tuple[Hashable, ...]
    weights: tuple[tuple[int, int], ...]
    number: int

    def is_current(self) -> bool:
        base = self.base()
        return base is not None and _weights(base) == self.weights


@dataclass
class Towers:
    """Numbers towers by their weights: a copy (the reference model's) has the number of the original.

    A weight that has been written to, by an optimizer or from a checkpoint, makes another tower.
    """

    _known: dict[Hashable, _Tower] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def number(self, base: Any) -> int:
        """Return the number of the tower of a base model in its present state."""
        adapters, weights = _adapters(base), _weights(base)
        key = id(base), adapters
        known = self._known.get(key)
        if known is not None and known.base() is base and known.weights == weights:
            return known.number
        same = (other for other in self._known.values() if other.adapters == adapters and _is_copy(base, other))
        number = next((other.number for other in same), None)
        number = next(self._numbers) if number is None else number
        self._known[key] = _Tower(ref(base), adapters, weights, number)
        return number


def _is_copy(base: Any, tower: _Tower) -> bool:
    """Whether a base model has a copy of a tower whose weights still are those that were numbered."""
    other = tower.base()
    if other is None or other is base or not tower.is_current():
        return False
    ours, theirs = list(parameters_of_tower(base)), list(parameters_of_tower(other))
    return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _weights(base: Any) -> tuple[tuple[int, int], ...]:
    """Where they lie, and how often each has been written to."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in parameters_of_tower(base))
