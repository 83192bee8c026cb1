"""Options that name plug-ins, and the options that plug-ins have themselves."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from vgr_trl import registries
from vgr_trl.config.option import option
from vgr_trl.errors import ConfigError
from vgr_trl.registries import Registry, needs_of, option_class, option_values, short_name

RULES: Mapping[str, Mapping[str, Any]] = {  # name of a rule of this library -> the options that switch it on
    "token_weights": {"token_weights": True},
    "perception_filter": {"enable_perception_filtering": True, "perception_weighting": "filter"},
    "perception_weights": {"enable_perception_filtering": True, "perception_weighting": "soft"},
    "entropy_filter": {"enable_entropy_filtering": True},
    "trajectory_scale": {"enable_trajectory_reweighting": True},
}
REMOVE_IMAGE = "remove_image"  # the only one that changes the prompt, not the image
PERTURBATIONS = (  # of this library
    "blacken_patches", "add_gaussian_noise", "gaussian_blur", "mask_image", "shuffle_patches", "crop_image",
    "diffusion_noise",
    REMOVE_IMAGE,
)  # fmt: skip


@dataclass
class PluginOptions:
    """What is added from outside; docs/extending.md says how."""

    credit_rules: list[str] | None = option(
        None,
        f"Rules that give tokens their credit: {', '.join(RULES)}; vgpo, pgpo, vepo, anchor_tokens "
        "(docs/recipes.md); those of installed packages, dotted paths or files (my_rules.py:my_rule).",
    )
    signals: list[str] | None = option(
        None,
        "Signals per token that are measured, logged and given to rewards: names, dotted paths or files "
        "(my_signals.py:my_signal).",
    )
    plugin_options: dict[str, Any] | str | None = option(
        None, "Options of plug-ins as JSON, where they are not given as flags of their own."
    )

    @property
    def plugin_rules(self) -> list[str]:
        """Those of `credit_rules` that are not of this library."""
        return [name for name in self.credit_rules or () if name not in RULES]

    def take_plugin_options(self, values: Mapping[str, Any]) -> None:
        """Add those of the values that options of the named plug-ins have."""
        known = self._known_options()
        self.plugin_options = self._given() | {name: value for name, value in values.items() if name in known}

    def plugin_values(self, plugin: Any, shown: str) -> Any:
        """Return the values of a plug-in's own options, all options of the run if it has none.

        Args:
            shown: its name for messages.
        """
        options = option_class(plugin, shown)
        return self if options is None else option_values(options, self._given())

    def readers(self) -> dict[str, list[str]]:
        """Return what plug-ins read of a rollout: measurement -> the signals and rules that need it.

        Raises:
            ConfigError: one of them, or what it reads, is not found.
        """
        found: dict[str, list[str]] = {}
        for name in self.signals or ():
            for need in registries.measurements([name]):
                found.setdefault(need, []).append(f"the signal {name}")
        for name in self.plugin_rules:
            for need in registries.measurements(needs_of(registries.credit_rules.load(name))):
                found.setdefault(need, []).append(f"the credit rule {name}")
        return found

    def _given(self) -> dict[str, Any]:
        given = self.plugin_options
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"plugin_options is {self.plugin_options!r}, which is no JSON ({error}).") from error
        if not isinstance(given, dict | None):
            raise ConfigError(f"plugin_options is {given!r}: give a JSON object of names and values.")
        return given or {}

    def _plugins(self) -> Iterator[tuple[Registry, str]]:
        yield from ((registries.credit_rules, name) for name in self.plugin_rules)
        yield from ((registries.signals, name) for name in self.signals or ())
        for name in dict.fromkeys([*getattr(self, "views", ()), *getattr(self, "noisy_perturbations", ())]):
            if name not in PERTURBATIONS:
                yield registries.perturbations, name

    def _known_options(self) -> set[str]:
        classes = [option_class(registry.load(name), name) for registry, name in self._plugins()]
        return {each.name for options in classes if options is not None for each in fields(options)}

    def check_plugins(self) -> None:
        """Switch the named rules of this library on; raise `ConfigError` for plug-ins that cannot be used."""
        self._switch_on()
        known = self._known_options()
        for registry, name in self._plugins():
            self.plugin_values(registry.load(name), name)
        for name in self._given():
            if name not in known:
                raise ConfigError(
                    f"plugin_options has {name!r}, which no plug-in that is named has: give "
                    f"{', '.join(sorted(known)) or 'none, as they have no options'}; a reward's options are given to "
                    "vgr_trl.rewards.load_reward."
                )
        for kind in ("credit_rules", "signals"):
            names = [short_name(name) for name in getattr(self, kind) or ()]
            if len(set(names)) < len(names):
                raise ConfigError(f"{kind} is {getattr(self, kind)}, two of which have one name: rename one.")
        self.readers()

    def _switch_on(self) -> None:
        named = [name for name in self.credit_rules or () if name in RULES]
        if {"perception_filter", "perception_weights"} <= set(named):
            raise ConfigError("credit_rules has perception_filter and perception_weights: give one of them.")
        for switch, value in (pair for name in named for pair in RULES[name].items()):
            if hasattr(self, switch):
                setattr(self, switch, value)
