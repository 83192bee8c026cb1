"""Registries of plug-ins: signals, credit rules, perturbations, rewards and data sets.

A plug-in is a function. Name it by its registered name (here, or an entry point of an installed package), by a dotted
path, or by file: `my_rules.py:my_rule`. The decorator `declares` states which signals it reads and its options.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from vgr_trl.utils import ConfigError, RewardError, VGRError

Plugin = TypeVar("Plugin")
# Signals that are measured, not computed from others; also `logps:NAME` for any perturbation NAME.
MEASUREMENTS = ("attention", "dependency", "entropies", "logps", "regions", "shift", "similarity", "views")
LOGPS_PREFIX = "logps:"
BLIND_ANSWERS = "blind_answers"  # rewards may need these; they are generated, not measured


@contextmanager
def _naming_import_errors(where: str, kind: str, error_type: type[VGRError]) -> Iterator[None]:
    """Convert errors of importing a plug-in into `error_type`, with the reason."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise error_type(
            f"{where}, imported for a {kind}, needs {error.name}, which is not installed: install it."
        ) from error
    except (Exception, SystemExit) as error:
        raise error_type(
            f"Importing {where} for a {kind} failed with {type(error).__name__}: {error}; fix it."
        ) from error


def _import_module(name: str, kind: str, error_type: type[VGRError]) -> ModuleType:
    """Import a module by dotted name, also from the working directory."""
    _make_importable(os.getcwd())
    with _naming_import_errors(name, kind, error_type):
        return importlib.import_module(name)


def import_file(path: str, kind: str = "plug-in", error_type: type[VGRError] = ConfigError) -> ModuleType:
    """Import a Python file as a module, once per process, and make its folder importable.

    The module keeps its file name if that is not taken, so that its functions can be pickled for child processes; else
    its name is derived from its path.

    Args:
        path: of the file.
        kind: kind of plug-in, for messages.
        error_type: raised if the file does not exist or cannot be imported.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise error_type(f"The file {path} of a {kind} does not exist (looked for {file}): give its path.")
    _make_importable(str(file.parent))
    name = file.stem
    if not _imports_file(name, file):
        name = f"{name}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        with _naming_import_errors(str(file), kind, error_type):
            spec.loader.exec_module(module)
    except error_type:
        del sys.modules[name]
        raise
    return module


def _imports_file(name: str, file: Path) -> bool:
    """Whether `import name` imports `file`."""
    loaded = sys.modules.get(name) or (importlib.util.find_spec(name) if name.isidentifier() else None)
    origin = getattr(loaded, "__file__", None) or getattr(loaded, "origin", None)
    return origin is not None and Path(origin).resolve() == file


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()


def _example_file(kind: str) -> str:
    """Return an example of a plug-in in a file, for messages: `my_rewards.py:my_reward`."""
    noun = kind.replace(" ", "_").replace("-", "_")
    return f"my_{noun}s.py:my_{noun}"


class Registry:
    """The plug-ins of one kind.

    Args:
        kind: name of the kind, for messages.
        group: entry point group of installed packages.
        module: registers the built-in plug-ins; imported when a name is first looked up.
        form: signature that a plug-in must have, for messages.
        error_type: raised if a plug-in is not found or cannot be imported.
    """

    def __init__(self, kind: str, group: str, module: str, form: str, error_type: type[VGRError] = ConfigError) -> None:
        self.kind, self.group, self.module, self.form, self.error_type = kind, group, module, form, error_type
        self._own: dict[str, Any] = {}

    def register(self, *names: str) -> Callable[[Plugin], Plugin]:
        """Return a decorator that registers a plug-in under `names`.

        Raises:
            VGRError: another plug-in has one of the names. Its type is the registry's `error_type`.
        """

        def add(plugin: Plugin) -> Plugin:
            for name in names:
                if self._own.setdefault(name, plugin) is not plugin:
                    raise self.error_type(f"There is a {self.kind} {name!r} already: register yours by another name.")
            return plugin

        return add

    def names(self) -> list[str]:
        """Return all registered names, including those of installed packages."""
        importlib.import_module(self.module)
        return sorted({*self._own, *(entry.name for entry in entry_points(group=self.group))})

    def load(self, spec: Any) -> Any:
        """Return the plug-in that `spec` names.

        Args:
            spec: a name, a dotted path `my_package.my_module.my_name`, or a file `my_file.py:my_name`, relative to the
                working directory or absolute. A function is returned unchanged.

        Raises:
            VGRError: the name is unknown or registered twice, the import fails, or the object is not a function. Its
                type is the registry's `error_type`.
        """
        if not isinstance(spec, str):
            return self.check_function(spec, repr(spec))
        name = spec.strip()
        path, colon, attribute = name.rpartition(":")
        if not colon and ("." not in name or name in self.names()):
            return self.check_function(self._find(name), repr(name))
        if not colon:
            path, _, attribute = name.rpartition(".")
        load = import_file if path.endswith(".py") else _import_module
        module = load(path, self.kind, self.error_type)
        if not hasattr(module, attribute):
            functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
            raise self.error_type(
                f"{path} has no {self.kind} {attribute!r}: give one of its functions "
                f"({', '.join(functions) or 'it has none'})."
            )
        return self.check_function(getattr(module, attribute), repr(name))

    def check_function(self, plugin: Any, shown: str) -> Any:
        """Return the plug-in, or raise if it is not a function; `shown` is its name for the message."""
        if not callable(plugin) or inspect.isclass(plugin):
            raise self.error_type(f"The {self.kind} {shown} is of type {type(plugin).__name__}: give {self.form}.")
        return plugin

    def _find(self, name: str) -> Any:
        importlib.import_module(self.module)
        own = self._own.get(name)
        registered = {entry.value: entry for entry in entry_points(group=self.group, name=name)}
        others = [entry for entry in registered.values() if own is None or not entry.value.startswith("vgr_trl.")]
        if len(others) + (own is not None) > 1:
            owners = ["vgr_trl"] * (own is not None) + [f"{_package_name(entry)} ({entry.value})" for entry in others]
            raise self.error_type(
                f"The {self.kind} {name!r} is registered more than once, by {' and by '.join(owners)}: give"
                f" the one you mean as a dotted path, such as {others[0].value.replace(':', '.')}."
            )
        if own is not None:
            return own
        if not others:
            file = _example_file(self.kind)
            noun = file.partition(":")[2]
            nearest = get_close_matches(name, self.names(), n=1)
            meant = f". Did you mean {nearest[0]}? Else give" if nearest else ": give"
            raise self.error_type(
                f"There is no {self.kind} {name!r}{meant} one of {', '.join(self.names())}, or a dotted path or file "
                f"such as my_package.{noun.removeprefix('my_')}s.{noun} or {file}."
            )
        with _naming_import_errors(f"{name} of {_package_name(others[0])}", self.kind, self.error_type):
            return others[0].load()


def _package_name(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


signals = Registry(
    "signal", "vgr_trl.signals", "vgr_trl.signals.named",
    "a function that takes the signals of a rollout and options and returns (N, T)",
)  # fmt: skip
credit_rules = Registry(
    "credit rule", "vgr_trl.credit", "vgr_trl.credit",
    "a function that takes advantages, signals, mask and options and returns weights (N, T) and metrics",
)  # fmt: skip
perturbations = Registry(
    "perturbation", "vgr_trl.perturbations", "vgr_trl.signals.perturbation",
    "a function that takes an image and returns one",
)  # fmt: skip
rewards = Registry(
    "reward", "vgr_trl.rewards", "vgr_trl.rewards.loading",
    "a function that takes completions and returns one number or None for each", RewardError,
)  # fmt: skip
datasets = Registry(
    "data set", "vgr_trl.datasets", "vgr_trl.data.public_sets",
    "a function that takes a published row and yields rows",
)  # fmt: skip


def declares(*, needs: Sequence[str] = (), options: type | None = None) -> Callable[[Plugin], Plugin]:
    """Return a decorator that declares which signals a plug-in reads, and its options.

    Args:
        needs: names of signals: built-in (`attention`, `dependency`, …) or plug-ins. Only these are measured.
        options: a dataclass; users set its fields in `plugin_options` (rewards: in `reward_function_kwargs`).
    """

    def mark(plugin: Any) -> Any:
        plugin.needs, plugin.options = tuple(needs), options
        return plugin

    return mark


def short_name(spec: str) -> str:
    """Return the last part of a plug-in's name: `my_rule` of `my_rules.py:my_rule`."""
    return spec.strip().rpartition(":")[2].rpartition(".")[2]


def needed_signals(plugin: Any) -> tuple[str, ...]:
    """Return the names of the signals that a plug-in reads."""
    return tuple(getattr(plugin, "needs", ()))


def is_measurement(name: str) -> bool:
    """Whether a signal is measured, not computed from others."""
    return name in MEASUREMENTS or name.startswith(LOGPS_PREFIX)


def is_measured_after_rewards(name: str) -> bool:
    """Whether a measurement runs after the rewards, in the pass over perturbed images."""
    return name in ("dependency", "shift", "views") or name.startswith(LOGPS_PREFIX)


def find_measurements(names: Iterable[str]) -> list[str]:
    """Return the measurements that signals read, directly or through other signals.

    Args:
        names: of signals.

    Raises:
        ConfigError: a signal is not found or depends on itself.
    """
    return list(dict.fromkeys(name for chain in map(_find_measurements, names) for name in chain))


def _find_measurements(name: str, within: tuple[str, ...] = ()) -> Iterator[str]:
    if name in within:
        raise ConfigError(f"The signal {name} needs itself ({' needs '.join([*within, name])}): remove one need.")
    if is_measurement(name):
        yield name
        return
    for need in needed_signals(signals.load(name)):
        yield from _find_measurements(need, (*within, name))


def build_options(options: type, given: Mapping[str, Any]) -> Any:
    """Return an instance of a plug-in's options dataclass, filled from the matching keys of `given`."""
    fields: Any = dataclasses.fields(options)
    return options(**{field.name: given[field.name] for field in fields if field.name in given})
