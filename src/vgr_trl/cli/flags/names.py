"""Names of flags, read from sources without importing them: a misspelt flag is told at once, not after torch."""

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
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
        "trl": ("trainer/grpo_config.py", "trainer/base_config.py", "trainer/model_config.py"),
        "transformers": ("training_args.py",),
    },
}
_OF_EVERY_COMMAND = ("config", "help", "help_all", "env")


def flag_names(command: str) -> set[str]:
    """Return the names of the options of a command, without dashes; empty if they are not known beforehand."""
    options = _options(command)
    return {*_OF_EVERY_COMMAND, *options} if options else set()


@cache
def _options(command: str) -> dict[str, bool]:
    """The options of a command by name, and whether each is a switch that is on by default; none if not known."""
    own = Path(__file__).parents[2]
    files = [file for pattern in _OWN.get(command, ()) for file in own.glob(pattern)]
    for package, paths in _OTHERS.get(command, {}).items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return {}
        files += [Path(spec.origin).parent / path for path in paths]
    if not files or not all(file.is_file() for file in files):
        return {}
    found: dict[str, bool] = {}
    for file in files:  # subclasses first
        for name, is_on in _fields(file):
            found.setdefault(name, is_on)
    return found


def _fields(file: Path) -> Iterable[tuple[str, bool]]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, _is_true(line.value)


def _is_true(value: ast.expr | None) -> bool:
    """Whether the value of a field is True: as it is, by `option(True, …)`, or by `field(default=True, …)`."""
    if isinstance(value, ast.Call):
        given = [*value.args[:1], *(keyword.value for keyword in value.keywords if keyword.arg == "default")]
        value = given[0] if given else None
    return isinstance(value, ast.Constant) and value.value is True


def check_flags(command: str, argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag that `command` does not have, with the nearest that it has."""
    options = _options(command)
    known = {*_OF_EVERY_COMMAND, *_flags(options)}
    for name, _ in flags_in(argv) if options else ():
        if name not in known and name not in (known := known | _flags(plugin_options(argv))):
            raise ConfigError(f"there is no flag --{name}.{did_you_mean(name, known, '--')}")


def _flags(options: Mapping[str, bool]) -> set[str]:
    return {*options, *(f"no_{name}" for name, is_on in options.items() if is_on)}


def plugin_options(argv: Sequence[str]) -> dict[str, bool]:
    """Return the options of plug-ins that are named, which have to be imported for it, and which are on by default."""
    from vgr_trl.cli.flags.plugins import options_on

    return options_on(argv)


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a sentence with the nearest of the known names, or where to find them."""
    nearest = get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {prefix}{nearest[0]}?" if nearest else " --help lists them, --help-all those of TRL too."
