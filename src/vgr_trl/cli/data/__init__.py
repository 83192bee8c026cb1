"""`vgr-trl data convert | merge | inspect`: question sets to one schema, merged, and checked.

Read `convert.py`, `merge.py`, and `inspect.py` with `inspecting.py` (what it does once its flags are read).
"""

import importlib
import sys
from collections.abc import Sequence

from vgr_trl.errors import ConfigError

COMMANDS = {
    "convert": "a public set, or files of your own, to one schema",
    "merge": "several converted sets to one, split into train and test",
    "inspect": "check any set before training, and look at some of its rows",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit status.

    Raises:
        ConfigError: there is no such command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<10}{what}" for name, what in COMMANDS.items()]
        print("\n".join(["usage: vgr-trl data COMMAND [flags]", "", *lines]))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(f"There is no data command {name!r}: the commands are {', '.join(COMMANDS)}.")
    try:
        return int(importlib.import_module(f"vgr_trl.cli.data.{name}").main(rest))
    except KeyboardInterrupt:
        print(f"\nvgr-trl data {name}: interrupted; the same command continues what is unfinished.", file=sys.stderr)
        return 130
