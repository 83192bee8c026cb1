"""Flags of reward files in the form of EasyR1 and MTRL."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vgr_trl.config.option import option
from vgr_trl.errors import ConfigError
from vgr_trl.rewards.scored_files import FileOptions


@dataclass
class RewardFileArguments:
    """How functions of files in the form of EasyR1 are called; of other rewards, the options that they declare."""

    reward_type: str | None = option(None, "Form of reward files of EasyR1: batch or sequential (else as they say).")
    reward_num_cpus: int = option(1, "Processes that a sequential reward file of EasyR1 is called in.")
    reward_function_kwargs: str | None = option(None, "Further arguments of reward files of EasyR1, as JSON.")

    plugin_options: dict[str, Any] = field(default_factory=dict, init=False)

    def take_plugin_options(self, values: Mapping[str, Any]) -> None:
        """Keep the values of the options of plug-ins, of which the rewards look up theirs."""
        self.plugin_options = dict(values)

    def file_options(self) -> FileOptions:
        """Return the options as the rewards take them, or raise `ConfigError` where they are no JSON object."""
        given = self.reward_function_kwargs
        try:
            arguments = json.loads(given) if isinstance(given, str) else given or {}
        except ValueError as error:
            raise ConfigError(f"reward_function_kwargs is {given!r}, which is no JSON ({error}).") from error
        if not isinstance(arguments, dict):
            raise ConfigError(f"reward_function_kwargs is {given!r}: give a JSON object of names and values.")
        return FileOptions(self.reward_type, self.reward_num_cpus, arguments)
