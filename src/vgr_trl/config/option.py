"""One option: its default, and the text that describes it wherever it is shown."""

from copy import copy
from dataclasses import field
from typing import Any


def option(default: Any, text: str, **parsing: Any) -> Any:
    """Return a field of a dataclass of options.

    Args:
        default: where nothing is given; of a list, every run gets a copy.
        text: its one description.
        parsing: arguments of argparse that its type does not say.
    """
    metadata = {"help": text, **parsing}
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)
