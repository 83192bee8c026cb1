"""`vgr-trl train | evaluate | report | data | demo | recipes | init | env | completion`."""

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from vgr_trl import __version__
from vgr_trl.cli.flags.config_file import check_config_file
from vgr_trl.cli.flags.foreign import without_foreign
from vgr_trl.cli.flags.names import check_flags, flag_names
from vgr_trl.cli.flags.recipe import check_recipe
from vgr_trl.cli.once import warnings_once
from vgr_trl.disk_full import is_disk_full
from vgr_trl.errors import VGRError

COMMANDS = {
    "train": "train a vision-language model with DAPO (the script of `accelerate launch`)",
    "evaluate": "measure accuracy, mean@k, pass@k and format of a model, without training",
    "report": "make one page of HTML of a run, or of several: curves, completions, what they looked at",
    "data": "convert public question sets to one schema, merge and inspect them",
    "demo": "train the embedded vision-language model and show accuracy before and after",
    "recipes": "list the published methods that `train --recipe NAME` starts from, or show one",
    "init": "write a commented YAML file for `vgr-trl train --config`",
    "env": "print versions and devices, for reports of faults",
    "completion": "print a script that completes commands and flags in bash or zsh",
}
TRANSLATED = ("train", "evaluate")  # which configurations of other trainers are run by
LOADING = ("train", "evaluate")  # what takes seconds to import is announced


def usage() -> str:
    """Return the help text."""
    lines = [f"  {name:<12}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: vgr-trl COMMAND [flags]", "", *lines, "", "vgr-trl COMMAND --help lists the flags."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit status; an error of this library is one sentence, not a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"vgr_trl {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        nearest = get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {nearest[0]}?" if nearest else f" The commands are {', '.join(COMMANDS)}."
        print(f"vgr-trl: there is no command {name!r}.{meant}", file=sys.stderr)
        return 2
    try:
        if name in TRANSLATED:
            name, rest = without_foreign(name, rest)
        check_flags(name, rest)
        check_config_file(rest, flag_names(name) | (flag_names("train") if name == "evaluate" else set()))
        if name == "train":
            check_recipe(rest, flag_names(name))
        if name in LOADING and os.environ.get("RANK", "0") == "0" and not {"-h", "--help", "--help-all"} & set(rest):
            print(f"vgr-trl {__version__}: {name}; loading torch, transformers and TRL", file=sys.stderr, flush=True)
        with warnings_once():
            return int(importlib.import_module(f"vgr_trl.cli.{name}").main(rest))
    except VGRError as error:
        print(f"vgr-trl {name}: {error}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as error:
        if not is_disk_full(error):
            raise
        what = getattr(error, "filename", None) or "files"
        print(f"vgr-trl {name}: disk full while writing {what}: free space, then run it again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupted:
        print(f"\nvgr-trl {name}: interrupted{'; ' * bool(interrupted.args)}{interrupted}.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
