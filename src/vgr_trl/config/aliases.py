"""Other names of options, those of our users' scripts, in one place."""

from dataclasses import dataclass, field
from typing import Any

from vgr_trl.errors import ConfigError

ALIASES = {
    "eval_num_generations": "num_generations_eval",
    "prompt_preview_chars": "prompt_preview_length",
    "completion_preview_chars": "completion_preview_length",
    "out_dir": "output_dir",
}


@dataclass
class AliasOptions:
    """Each option means the one that `ALIASES` names; None: that one is left as it is."""

    eval_num_generations: int | None = field(default=None, metadata={"help": "Alias of num_generations_eval."})
    prompt_preview_chars: int | None = field(default=None, metadata={"help": "Alias of prompt_preview_length."})
    completion_preview_chars: int | None = field(default=None, metadata={"help": "Alias of completion_preview_length."})
    out_dir: str | None = field(default=None, metadata={"help": "Alias of output_dir."})

    def resolve_aliases(self) -> None:
        """Set the options that aliases stand for, or raise `ConfigError` where both are given and differ."""
        options: dict[str, Any] = type(self).__dataclass_fields__
        for alias, name in ALIASES.items():
            given, before = getattr(self, alias), getattr(self, name)
            if given is None:
                continue
            if before not in (given, options[name].default):
                raise ConfigError(
                    f"{alias} is {given} and {name}, of which it is an alias, is {before}: give one of them, or the "
                    "same value twice."
                )
            setattr(self, name, given)
