"""What stands on a command line and in the file of `--config`, before any parser has read it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml


def flags_in(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the flags by the names of their options (`--data-files` is data_files), each with the values behind it."""
    name, values = "", list[str]()
    for argument in argv:
        if argument.startswith("--"):
            if name:
                yield name, values
            flag, equals, value = argument[2:].partition("=")
            name, values = flag.replace("-", "_"), [value] if equals else []
        else:
            values.append(argument)
    if name:
        yield name, values


def config_apart(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `--config=FILE` as two of them, the form that TRL reads."""
    parts = (argument.split("=", 1) if argument.startswith("--config=") else [argument] for argument in argv)
    return [part for argument in parts for part in argument]


def config_values(argv: Sequence[str]) -> dict[str, Any]:
    """Return what the file of `--config` holds, nothing if it is none: that is told elsewhere."""
    try:
        values = yaml.safe_load(Path(dict(flags_in(argv))["config"][0]).read_text(encoding="utf-8-sig"))
    except (KeyError, IndexError, OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
