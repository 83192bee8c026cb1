"""The options of plug-ins that a command line, its file, or its recipe names: they become flags like any other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from vgr_trl import registries
from vgr_trl.cli.flags.argv import config_values, flags_in
from vgr_trl.cli.flags.recipe import recipe_options
from vgr_trl.errors import ConfigError
from vgr_trl.registries import Registry, option_class

NAMING: Mapping[str, Registry] = {
    "credit_rules": registries.credit_rules,
    "signals": registries.signals,
    "perturbation": registries.perturbations,
    "further_perturbations": registries.perturbations,
    "reward_funcs": registries.rewards,
}


def option_classes(argv: Sequence[str], known: Sequence[type] = ()) -> list[type]:
    """Return the dataclasses of options of the plug-ins that are named.

    Args:
        argv: arguments of a command.
        known: the dataclasses of its other options.

    Raises:
        VGRError: a plug-in is not found, or one of its options has the name of another option.
    """
    owners = {field.name: "vgr-trl" for group in known for field in fields(group)}
    found: list[type] = []
    for registry, name in _named(argv):
        options = option_class(registry.load(name.partition("[")[0]), name)
        if options is None or options in found:
            continue
        for field in fields(options):
            if (owner := owners.setdefault(field.name, name)) is not name:
                raise ConfigError(f"The {registry.kind} {name} has an option {field.name}, as {owner} has: rename it.")
        found.append(options)
    return found


def options_on(argv: Sequence[str]) -> dict[str, bool]:
    """Return the options of the plug-ins that are named, and whether each is a switch that is on by default."""
    return {field.name: field.default is True for options in option_classes(argv) for field in fields(options)}


def _named(argv: Sequence[str]) -> Iterator[tuple[Registry, str]]:
    given = recipe_options(argv) | config_values(argv) | dict(flags_in(argv))
    for option, registry in NAMING.items():
        names = given.get(option) or []
        texts = [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)]
        yield from ((registry, name) for name in texts)
