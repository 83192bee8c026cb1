"""Names of flags, read from sources without importing them: a misspelt flag is told at once, not after torch."""

import ast
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from vgr_trl.cli.flags.argv import flags_in
from vgr_trl.errors import ConfigError

_OWN = {
    "train": (
        "cli/flags/arguments.py",
        "cli/flags/reward_files.py",
        "config/*.py",
        "config/stages/*.py",
        "config/foreign/aliases.py",
    ),
    "evaluate": ("cli/flags/arguments.py", "cli/flags/reward_files.py", "cli/flags/evaluation.py"),
}  # fmt: skip
_OTHERS = {
    "train": {
        "trl": ("trainer/base_config.py", "trainer/grpo_config.py", "trainer/model_config.py"),
        "transformers": ("training_args.py",),
    },
}
_OF_EVERY_COMMAND = ("config", "help", "help_all", "env")


def flag_names(command: str) -> set[str]:
    """Return the names of the flags of a command, without dashes; empty if they are not known beforehand."""
    own = Path(__file__).parents[2]
    files = [file for pattern in _OWN.get(command, ()) for file in own.glob(pattern)]
    for package, paths in _OTHERS.get(command, {}).items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return set()
        files += [Path(spec.origin).parent / path for path in paths]
    if not files or not all(file.is_file() for file in files):
        return set()
    return {*_OF_EVERY_COMMAND, *(name for file in files for name in _fields(file))}


def _fields(file: Path) -> Iterable[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id


def check_flags(command: str, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag that `command` does not have, with the nearest that it has."""
    known = flag_names(command)
    for name, _ in flags_in(argv) if known else ():
        names = {name, name.removeprefix("no_")}
        if not names & known and not names & (known := known | plugin_options(argv)):
            raise ConfigError(f"there is no flag --{name}.{did_you_mean(name, known, '--')}")


def plugin_options(argv: Sequence[str]) -> set[str]:
    """Return the names of the options of plug-ins that are named, which have to be imported for it."""
    from vgr_trl.cli.flags.plugins import option_names

    return option_names(argv)


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a sentence with the nearest of the known names, or where to find them."""
    candidates = [*known, *(f"no_{option}" for option in known)]
    nearest = get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f" Did you mean {prefix}{nearest[0]}?" if nearest else " --help lists them, --help-all those of TRL too."
