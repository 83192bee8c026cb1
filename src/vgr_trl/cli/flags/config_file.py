"""The YAML file of `--config`: checked before its values become defaults of flags."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from vgr_trl.cli.flags.names import did_you_mean, plugin_options
from vgr_trl.errors import ConfigError
from vgr_trl.yaml_file import parse_yaml


def config_apart(argv: Sequence[str]) -> list[str]:
    """Return the arguments with `--config=FILE` as two of them, the form that TRL reads."""
    return [part for argument in argv for part in _apart(argument)]


def _apart(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--config=") else [argument]


def check_config_file(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the file of `--config`, if there is one, holds values of known options.

    Args:
        argv: arguments, `--config` apart from its file.
        known: names of the options; empty: not known, nothing is checked.
    """
    if "--config" not in argv or not (known := set(known)):
        return
    following = argv[argv.index("--config") + 1 :]
    if not following:
        raise ConfigError("--config is given without a file: give the path of a YAML file.")
    file, known = Path(following[0]), {*known, "env"}
    if not file.is_file():
        raise ConfigError(f"--config is {file}, which is no file: give the path of a YAML file.")
    try:
        values = parse_yaml(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no options: give lines of the form `learning_rate: 1e-5`.")
    for key in values:
        if key not in known and key not in (known := known | plugin_options(argv)):
            raise ConfigError(f"{file} has {key}, which is no option.{did_you_mean(str(key), known)}")
        if values[key] is False and key.endswith("_strategy"):
            raise ConfigError(f'{file} has {key}: no, which YAML reads as false: write "no" in quotes.')
