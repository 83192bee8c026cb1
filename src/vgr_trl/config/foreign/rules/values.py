"""What a rule is given."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vgr_trl.errors import ConfigError

Set = Callable[..., None]  # (option, value, *keys)


@dataclass
class Values:
    """The values of all keys of EasyR1, stated or default.

    Args:
        by_key: the values.
        processes: of this run.
        stated: the keys that the configuration states; the defaults of others are theirs.
        stopped: reasons by key why a value has no meaning here; rules add to them.
        refused: likewise, of values without which something else would be trained.
    """

    by_key: Mapping[str, Any]
    processes: int
    stated: Collection[str] = ()
    stopped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.by_key[key]

    def stop(self, key: str, why: str) -> None:
        """Note that the value of a key has no meaning here."""
        self.stopped[key] = why

    def refuse(self, key: str, why: str) -> None:
        """Note that the value of a key cannot be followed, and that without it something else would be trained."""
        self.refused[key] = why

    def whole(self, key: str, least: int = 1) -> int:
        """Return a whole number, or raise `ConfigError`."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{key} is {value!r}: give a whole number of at least {least}.")
        return value

    def one_of(self, key: str, *known: Any) -> Any:
        """Return a value that is one of those known, else note why not and return the first."""
        if self[key] in known:
            return self[key]
        self.refuse(key, f"here it can be {', '.join(map(str, known))}")
        return known[0]

    @property
    def updates(self) -> int:
        """Updates of the policy, our steps, per rollout, their step."""
        keys = "data.rollout_batch_size", "worker.actor.global_batch_size"
        rollout, update = map(self.whole, keys)
        if rollout % update:
            missing = next((key for key in keys if key not in self.stated), None)
            raise ConfigError(
                f"{keys[0]} is {rollout} and {keys[1]} {update}, but a rollout is a multiple of the prompts of an "
                f"update: {f'add {missing}, whose default this is' if missing else 'change one of the two'}."
            )
        return rollout // update * self.whole("worker.actor.ppo_epochs")
