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


def convert(given: Mapping[str, Any], processes: int = 1) -> Conversion:
    """Convert a configuration, with EasyR1's or verl's defaults for keys that it does not state.

    Args:
        given: stated values by dotted key.
        processes: number of processes of this run.

    Raises:
        ConfigError: a value would be invalid in EasyR1 too, or two names of one key have different values.
    """
    is_verl = any(key.startswith("actor_rollout_ref.") for key in given)
    stated, names = rename_verl_keys(given) if is_verl else rename_mtrl_keys(given)
    framework = "verl" if is_verl else "MTRL" if uses_mtrl_sections(given) else "EasyR1"
    known = EASYR1_KEYS | VERL_KEYS
    keys = {key for key in known if names.get(key, key) in given}
    found = Conversion({key: each.default for key, each in known.items()}, processes, names, keys, framework)
    for key, value in stated.items():
        if key in known:
            check_type(found.name(key), value, known[key])
            found.values[key] = value
    for rule in CONVERTERS:
        rule(found)
    for key, each in known.items():
        if each.option is not None and CONDITIONS[each.condition](found):
            found.set(each.option, found[key], key)
        elif each.accepted is not None and found[key] not in each.accepted:
            found.mark_unsupported(key, each.why)
    for key in (key for key in stated if key not in known):
        found.unsupported[key] = f"is unknown.{suggest_key(key, found)}"
    return found


def suggest_key(key: str, found: Conversion) -> str:
    """Return a sentence that suggests the key with the last part of an unknown one, or that sets its option."""
    section, _, last = key.rpartition(".")
    same = [each for each in EASYR1_KEYS if last in (each.rpartition(".")[2], *found.options_by_key.get(each, ()))]
    nearest = [each for each in same if each.startswith(section)] or same
    known = [*map(found.name, EASYR1_KEYS)]
    return f" Did you mean {found.name(nearest[0])}?" if nearest else did_you_mean(found.name(key), known)
