"""Vision tower and merger of a model: do they train, do they have adapters, do they use dropout."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
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


def has_tower_adapters(base: Any) -> bool:
    """Whether PEFT has put adapters, which can be switched off, into tower or merger."""
    adapters = BaseTunerLayer, AuxiliaryTrainingWrapper
    return any(isinstance(module, adapters) for part in parts_of_tower(base) for module in part.modules())


def tower_draws(base: Any) -> bool:
    """Whether dropout is at work in tower or merger while training."""
    return any(has_active_dropout(part, when_training=True) for part in parts_of_tower(base))
