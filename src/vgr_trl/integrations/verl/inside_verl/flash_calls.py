"""Attention that verl calls by itself: with padding removed, layers of Qwen2-VL and GLM-4V look nothing up.

For the duration their calls go through transformers' registry, where a probe finds them.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import is_attention
from vgr_trl.signals.decoder import find_decoder

MODULES = ("verl.models.transformers.qwen2_vl", "verl.models.transformers.glm4v")
NAME = "_custom_flash_attention_forward"


@contextmanager
def looked_up(model: Any) -> Iterator[None]:
    """Let the layers of `model` look their attention up, whichever function they call."""
    running: list[Any] = []

    def enter(module: Any, args: Any) -> None:
        running[:] = [module]

    with ExitStack() as stack:
        for module in find_decoder(model).modules():
            if is_attention(module):
                stack.callback(module.register_forward_pre_hook(enter).remove)
        for name in MODULES:
            owner: Any = importlib.import_module(name)
            if hasattr(owner, NAME):
                through = partial(_through_registry, getattr(owner, NAME), running)
                stack.enter_context(replaced(owner, NAME, through))
        yield


def _through_registry(
    plain: Any, running: list[Any], query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> Any:
    """Call `plain` (rows, positions, heads, width) as transformers calls functions (rows, heads, positions, width)."""

    def function(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return plain(*(side.transpose(1, 2) for side in (query, key, value)), mask, **options), None

    found = ALL_ATTENTION_FUNCTIONS.get_interface("eager", function)
    sides = (side.transpose(1, 2) for side in (query, key, value))
    return found(running[0], *sides, mask, **options)[0]
