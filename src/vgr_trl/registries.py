"""Registries of plug-ins: signals, credit rules, loss terms, perturbations, views, rewards and data sets.

A plug-in is a function. Name it by its registered name (here, or an entry point of an installed package), by a dotted
path, or by file: `my_rules.py:my_rule`. The decorator `declares` states which signals it reads and its options.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import xxhash

from vgr_trl.errors import ConfigError, RewardError, VGRError, did_you_mean

Plugin = TypeVar("Plugin")
# Signals that are measured, not computed from others; also `logps:NAME` for any perturbation or view NAME.
MEASUREMENTS = ("attention", "dependency", "entropies", "logps", "regions", "shift", "similarity", "views")
LOGPS_PREFIX = "logps:"
TEACHER = "teacher"  # the view that `teacher_view` names
DESCRIBER = "teacher_of_description"  # the view that `teacher_description_view` names
# Quantities that loss terms may need -> the measurement of the rollout that they take, if any.
TERM_NEEDS = {"perturbed": "perception", "hidden": None, "teacher": "views", "teacher_top": "teacher_top"}
BLIND_ANSWERS = "blind_answers"  # answers that rewards may need; they are generated, not measured


@contextmanager
def _naming_import_errors(where: str, kind: str, error_type: type[VGRError]) -> Iterator[None]:
    """Convert the errors of importing a plug-in into `error_type`, with the reason."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise error_type(f"Importing {where} for a {kind} failed with {type(error).__name__}: {error}.") from error


def import_file(path: str, kind: str = "plug-in", error_type: type[VGRError] = ConfigError) -> ModuleType:
    """Import a Python file as a module, once per process, and make its folder importable.

    The module has the name of its file if that is free, so that child processes can unpickle its functions; or else a
    name derived from its path.

    Args:
        path: path of the file.
        kind: kind of plug-in, for messages.
        error_type: raised if the file does not exist or cannot be imported.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise error_type(f"The file {path} of a {kind} does not exist (looked for {file}): give its path.")
    _make_importable(str(file.parent))
    name = file.stem
    if not _imports_file(name, file):
        name = f"{name}_{xxhash.xxh3_64_hexdigest(str(file).encode())}"
    if name in sys.modules:
        return sys.modules[name]
    spec: Any = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        with _naming_import_errors(str(file), kind, error_type):
            spec.loader.exec_module(module)
    except error_type:
        del sys.modules[name]
        raise
    return module


def _imports_file(name: str, file: Path) -> bool:
    """Return whether `import name` imports `file`."""
    loaded = sys.modules.get(name) or (importlib.util.find_spec(name) if name.isidentifier() else None)
    origin = getattr(loaded, "__file__", None) or getattr(loaded, "origin", None)
    return origin is not None and Path(origin).resolve() == file


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()


def import_attribute(spec: str, kind: str, error_type: type[VGRError] = ConfigError) -> Any:
    """Import the object that a dotted path (`my_package.my_module.my_name`) or a file (`my_file.py:my_name`) names.

    Args:
        spec: a dotted path, or a file, absolute or relative to the working directory.
        kind: kind of plug-in, for messages.
        error_type: raised if the module cannot be imported or has no such name.
    """
    path, _, attribute = spec.rpartition(":" if ":" in spec else ".")
    if path.endswith(".py"):
        module = import_file(path, kind, error_type)
    else:
        _make_importable(os.getcwd())
        with _naming_import_errors(path, kind, error_type):
            module = importlib.import_module(path)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = {key: value for key, value in vars(module).items() if callable(value) and key[0] != "_"}
        accepted = ", ".join(key for key in public if public[key].__module__ == module.__name__) or "another module"
        raise error_type(f"{path} has no {kind} {attribute!r}: give one of {accepted}.") from None


class Registry:
    """The plug-ins of one kind.

    Args:
        kind: name of the kind, for messages.
        group: entry point group of installed packages.
        module: module that registers the built-in plug-ins; imported at the first look-up.
        error_type: raised if a plug-in is not found or cannot be imported.
    """

    def __init__(self, kind: str, group: str, module: str, error_type: type[VGRError] = ConfigError) -> None:
        self.kind, self.group, self.module, self.error_type = kind, group, module, error_type
        self._own: dict[str, Any] = {}

    def register(self, *names: str) -> Callable[[Plugin], Plugin]:
        """Return a decorator that registers a plug-in under `names`.

        Raises:
            VGRError: another plug-in has one of the names; of the registry's `error_type`.
        """

        def add(plugin: Plugin) -> Plugin:
            for name in names:
                if self._own.setdefault(name, plugin) is not plugin:
                    raise self.error_type(f"A {self.kind} {name!r} is already registered: use another name.")
            return plugin

        return add

    def names(self) -> list[str]:
        """Return all registered names, including names from installed packages."""
        importlib.import_module(self.module)
        return sorted({*self._own, *(entry.name for entry in entry_points(group=self.group))})

    def load(self, spec: Any) -> Any:
        """Load the plug-in that `spec` names.

        Args:
            spec: a name, a dotted path `my_package.my_module.my_name`, or a file `my_file.py:my_name`, relative to the
                working directory or absolute. A function is returned unchanged.

        Raises:
            VGRError: the name is unknown or registered twice, the import fails, or the object is not a function; of the
                registry's `error_type`.
        """
        plugin = spec
        if isinstance(spec, str):
            name = spec.strip()
            is_path = ":" in name or ("." in name and name not in self.names())
            plugin = import_attribute(name, self.kind, self.error_type) if is_path else self._find(name)
        if not callable(plugin) or inspect.isclass(plugin):
            raise self.error_type(f"The {self.kind} {spec!r} is of type {type(plugin).__name__}: give a function.")
        return plugin

    def _find(self, name: str) -> Any:
        importlib.import_module(self.module)
        entries_of_name = entry_points(group=self.group, name=name)  # plug-ins of this library are entry points too
        entries = {entry.value: entry for entry in entries_of_name if not entry.value.startswith("vgr_trl.")}
        owners = ["vgr_trl"] * (name in self._own) + list(entries)
        if len(owners) > 1:
            problem = f"The {self.kind} {name!r} is registered more than once, by {' and by '.join(owners)}"
            raise self.error_type(f"{problem}: give a dotted path, such as {owners[1].replace(':', '.')}.")
        if name in self._own:
            return self._own[name]
        if not entries:
            problem = f"There is no {self.kind} {name!r}.{did_you_mean(name, self.names())}"
            alternatives = "a dotted path (my_package.my_module.my_function) or a file (my_file.py:my_function)"
            raise self.error_type(f"{problem} Give one of {', '.join(self.names())}, {alternatives}.")
        with _naming_import_errors(owners[0], self.kind, self.error_type):
            return entries[owners[0]].load()


signals = Registry("signal", "vgr_trl.signals", "vgr_trl.signals.named")
credit_rules = Registry("credit rule", "vgr_trl.credit", "vgr_trl.credit")
loss_terms = Registry("loss term", "vgr_trl.loss_terms", "vgr_trl.loss")
perturbations = Registry("perturbation", "vgr_trl.perturbations", "vgr_trl.signals.perturbation")
views = Registry("view", "vgr_trl.views", "vgr_trl.signals.perturbation")
rewards = Registry("reward", "vgr_trl.rewards", "vgr_trl.rewards.loading", RewardError)
datasets = Registry("data set", "vgr_trl.datasets", "vgr_trl.data.convert")


def declares(
    *, needs: Sequence[str] = (), options: type | None = None, completion_type: type = list
) -> Callable[[Plugin], Plugin]:
    """Return a decorator that declares the signals that a plug-in reads, and its options.

    Args:
        needs: names of signals, built-in (`attention`, `dependency`, …) or plug-ins; of a loss term, of `TERM_NEEDS`.
            Only what is needed is measured.
        options: a dataclass; users set its fields in `plugin_options` (rewards: in `reward_function_kwargs`).
        completion_type: type of completions that a reward gets; `str`: strings, as in ms-swift; list: messages.
    """

    def mark(plugin: Any) -> Any:
        plugin.needs, plugin.options, plugin.completion_type = tuple(needs), options, completion_type
        return plugin

    return mark


def call_plugin(name: str, plugin: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a plug-in that reads signals; explain errors that an undeclared signal may have caused.

    Raises:
        ConfigError: the plug-in raised an error for which a signal that was not measured may be the reason.
    """
    try:
        return plugin(*arguments, **named)
    except (AttributeError, KeyError, TypeError) as error:
        cure = f"it gets only what declares(needs={needed_signals(plugin)}) names: add all that it reads, or correct it"
        raise ConfigError(f"{name} raised {type(error).__name__} ({error}); {cure}.") from error


def short_name(spec: str) -> str:
    """Return the last part of a plug-in's name: `my_rule` of `my_rules.py:my_rule`."""
    return spec.strip().rpartition(":")[2].rpartition(".")[2]


def declared_options(plugin: Any) -> Any:
    """Return the dataclass of options that a plug-in declares, or None."""
    return getattr(plugin, "options", None)


def needed_signals(plugin: Any) -> tuple[str, ...]:
    """Return the names of the signals that a plug-in reads."""
    needs = getattr(plugin, "needs", ())
    return tuple(needs) if isinstance(needs, tuple | list) else ()  # some objects answer every attribute


def is_measurement(name: str) -> bool:
    """Return whether a signal is measured, not computed from other signals."""
    return name in MEASUREMENTS or name.startswith(LOGPS_PREFIX)


def is_measured_after_rewards(name: str) -> bool:
    """Return whether a measurement runs after the rewards, in the pass over perturbed images."""
    return name in ("dependency", "shift", "views") or name.startswith(LOGPS_PREFIX)


def find_measurements(names: Iterable[str], within: Sequence[str] = ()) -> list[str]:
    """Return the measurements that signals read, directly or through other signals.

    Args:
        names: names of signals.
        within: signals that read these, the nearest last.

    Raises:
        ConfigError: a signal is not found or depends on itself.
    """
    measurements: list[str] = []
    for name in names:
        chain = [*within, name]
        if name in within:
            raise ConfigError(f"The signal {name} needs itself ({' needs '.join(chain)}): remove one dependency.")
        measurements += [name] if is_measurement(name) else find_measurements(needed_signals(signals.load(name)), chain)
    return list(dict.fromkeys(measurements))


def build_options(options: type, values: Mapping[str, Any]) -> Any:
    """Build a plug-in's options, a dataclass, from the matching keys of `values`."""
    fields: Any = dataclasses.fields(options)
    return options(**{field.name: values[field.name] for field in fields if field.name in values})
