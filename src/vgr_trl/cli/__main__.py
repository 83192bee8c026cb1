"""`vgr-trl train | evaluate | report | data | demo | recipes | init | env | completion`."""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from vgr_trl import __version__
from vgr_trl.cli.flags import check_config_file, check_flags, check_recipe, flag_names, without_foreign
from vgr_trl.utils import VGRError, is_disk_full

# ---------------------------------------------------------------------------------------------------------------------
# Warnings on the terminal: each of them once, so that the lines of the steps are seen.


_RENAMED = r"`\w*gradient_checkpointing\w*` is deprecated"  # by transformers 5.23, and TRL 1.16 calls it at every step


@contextmanager
def warnings_once() -> Iterator[None]:
    """Show a warning of the same place and text once, and none that asks TRL to call something by its later name.

    Python itself forgets what it has shown whenever a filter changes, which TRL does at every step.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
        show, shown = warnings.showwarning, set()

        def show_new(
            message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
        ) -> None:
            known = (str(message), filename, lineno)
            if known not in shown:
                shown.add(known)
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_new
        yield


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
