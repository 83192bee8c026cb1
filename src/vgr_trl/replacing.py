"""Setting an attribute, or a method, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from threading import get_ident
from typing import Any

from vgr_trl.errors import ConfigError


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or object for the duration; an object that had none of its own has none after."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def replaced_method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of a method of one object for the duration; copies of the object call their own method.

    Raises:
        ConfigError: another thread has replaced the method; whichever ends first would undo the other's.
    """
    plain = getattr(owner, name)
    if isinstance(plain, _Replacement) and plain.thread != get_ident():
        raise ConfigError(
            f"Another thread shares prompts in this {type(owner).__name__}: "
            "enter share_prompts once, around both threads."
        )
    with replaced(owner, name, _Replacement(plain, function)):
        yield


class _Replacement:
    """Looks like the plain method. Copied or pickled with its owner it is that method, of the copy."""

    def __init__(self, plain: Callable[..., Any], function: Callable[..., Any]) -> None:
        update_wrapper(self, plain)
        self.plain, self.function, self.thread = plain, function, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.plain,)


def _itself(value: Any) -> Any:
    return value
