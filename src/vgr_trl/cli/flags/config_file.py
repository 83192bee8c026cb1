"""The YAML file of `--config`: checked before its values become defaults of flags."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from vgr_trl.cli.flags.argv import flags_in
from vgr_trl.cli.flags.names import did_you_mean, plugin_options
from vgr_trl.errors import ConfigError
from vgr_trl.yaml_file import parse_yaml


def check_config_file(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` unless the file of `--config`, if there is one, holds values of known options.

    Args:
        argv: arguments of a command.
        known: names of the options; empty: not known, nothing is checked.
    """
    given = dict(flags_in(argv)).get("config")
    if given is None or not (known := set(known)):
        return
    if not given:
        raise ConfigError("--config is given without a file: give the path of a YAML file.")
    file, known = Path(given[0]), {*known, "env"}
    if not file.is_file():
        raise ConfigError(f"--config is {file}, which is no file: give the path of a YAML file.")
    try:
        values = parse_yaml(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no options: give lines of the form `learning_rate: 1e-5`.")
    for key in values:
        if key not in known and key not in (known := known.union(plugin_options(argv))):
            raise ConfigError(f"{file} has {key}, which is no option.{did_you_mean(str(key), known)}")
        if values[key] is False and key.endswith("_strategy"):
            raise ConfigError(f'{file} has {key}: no, which YAML reads as false: write "no" in quotes.')
