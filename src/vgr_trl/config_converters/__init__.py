"""Convert configurations of EasyR1, MTRL, VPPO and verl into options of this library.

`easyr1.yaml` and `verl.yaml` list every key with its default in that trainer, and which keys are renamed, ignored or
fixed; `mtrl.yaml` has the names of MTRL and VPPO. The functions of `easyr1.py` compute options from the other keys.
"""

from collections.abc import Mapping
from typing import Any

from vgr_trl.config_converters.conversion import Conversion, flatten, read_configuration
from vgr_trl.config_converters.easyr1 import CONDITIONS, CONVERTERS
from vgr_trl.config_converters.key_tables import (
    EASYR1_KEYS,
    VERL_KEYS,
    check_type,
    rename_mtrl_keys,
    rename_verl_keys,
    uses_mtrl_sections,
)
from vgr_trl.errors import did_you_mean

__all__ = ["EASYR1_KEYS", "Conversion", "convert", "flatten", "read_configuration"]


def convert(configuration: Mapping[str, Any], processes: int = 1) -> Conversion:
    """Convert a configuration, with EasyR1's or verl's defaults for keys that it does not state.

    Args:
        configuration: stated values by dotted key.
        processes: number of processes of this run.

    Raises:
        ConfigError: a value would be invalid in EasyR1 too, or two names of one key have different values.
    """
    is_verl = any(key.startswith("actor_rollout_ref.") for key in configuration)
    stated, names = rename_verl_keys(configuration) if is_verl else rename_mtrl_keys(configuration)
    framework = "verl" if is_verl else "MTRL" if uses_mtrl_sections(configuration) else "EasyR1"
    all_keys = EASYR1_KEYS | VERL_KEYS
    keys = {key for key in all_keys if names.get(key, key) in configuration}
    conversion = Conversion({key: row.default for key, row in all_keys.items()}, processes, names, keys, framework)
    for key, value in stated.items():
        if key in all_keys:
            check_type(conversion.name(key), value, all_keys[key])
            conversion.values[key] = value
    for rule in CONVERTERS:
        rule(conversion)
    for key, row in all_keys.items():
        if row.option is not None and CONDITIONS[row.condition](conversion):
            conversion.set(row.option, conversion[key], key)
        elif row.accepted is not None and conversion[key] not in row.accepted:
            conversion.mark_unsupported(key, row.why)
    for key in (key for key in stated if key not in all_keys):
        conversion.unsupported[key] = f"is unknown.{suggest_key(key, conversion)}"
    return conversion


def suggest_key(key: str, conversion: Conversion) -> str:
    """Return a sentence that suggests the key with the last part of an unknown one, or that sets its option."""
    section, _, last = key.rpartition(".")
    same = [name for name in EASYR1_KEYS if last in (name.rpartition(".")[2], *conversion.options_by_key.get(name, ()))]
    nearest = [name for name in same if name.startswith(section)] or same
    names = [*map(conversion.name, EASYR1_KEYS)]
    return f" Did you mean {conversion.name(nearest[0])}?" if nearest else did_you_mean(conversion.name(key), names)
