"""Replace attributes and methods of objects, and restore the random state, for the duration of a block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import update_wrapper
from threading import get_ident
from typing import TYPE_CHECKING, Any
from unittest import mock

from vgr_trl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def patched_attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """Set an attribute for the duration, and delete it afterwards if it was not there before.

    Args:
        owner: a module or an object.
        name: name of the attribute.
        value: its value for the duration.
    """
    return mock.patch.object(owner, name, value, create=True)


def patched_attributes(owner: Any, **values: Any) -> AbstractContextManager[Any]:
    """Set several attributes of an object as `patched_attribute` sets one."""
    return mock.patch.multiple(owner, create=True, **values) if values else nullcontext()


@contextmanager
def patched_method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object for the duration; copies of the object call the original method.

    Args:
        owner: the object.
        name: the method's name.
        function: replaces the method.

    Raises:
        ConfigError: another thread has replaced the method; the thread that ends first would undo both.
    """
    plain = getattr(owner, name)
    if isinstance(plain, _Replacement) and plain.thread != get_ident():
        raise ConfigError(f"Another thread shares prompts in this {type(owner).__name__}: enter share_prompts once.")
    with patched_attribute(owner, name, _Replacement(plain, function)):
        yield


class _Replacement:
    """Calls the function and looks like the original method; becomes the copy's method when its owner is copied."""

    def __init__(self, plain: Callable[..., Any], function: Callable[..., Any]) -> None:
        update_wrapper(self, plain)
        self.plain, self.function, self.thread = plain, function, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.plain,)


def _identity(value: Any) -> Any:
    return value


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout and gradient checkpointing off in this block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def keep_random_state(device: "torch.device") -> AbstractContextManager[None]:
    """Restore the random state after this block, in which dropout draws random numbers.

    For passes that only metrics, records and checks read: a resumed run makes more of them than an uninterrupted run,
    and has to draw the same numbers for training.
    """
    import torch  # the converter of configurations does without torch

    return torch.random.fork_rng([device] * (device.type != "cpu"))
