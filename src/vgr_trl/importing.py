"""Importing the module or file that a plug-in of the user is in."""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from vgr_trl.errors import ConfigError, VGRError


def import_module(name: str, kind: str = "plug-in", error_type: type[VGRError] = ConfigError) -> ModuleType:
    """Return the module with this dotted name, from the working directory too.

    Args:
        name: dotted.
        kind: what is looked for in it, for messages.
        error_type: raised if it does not exist, or importing it fails.
    """
    _make_importable(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise error_type(
                f"There is no module {name!r} ({error}): install it, run in the folder it is in, or give the file as "
                f"{file_form(kind)}."
            ) from error
        raise error_type(_failed(name, kind, error)) from error
    except (Exception, SystemExit) as error:
        raise error_type(_failed(name, kind, error)) from error


def import_file(path: str, kind: str = "plug-in", error_type: type[VGRError] = ConfigError) -> ModuleType:
    """Return the module that the Python file `path` is, the same one each time.

    It is registered under its own name where that is free, so that its functions can be pickled and unpickled in a
    process started from this one, else under a name made from its path; its folder can be imported from.

    Args:
        path: of the file.
        kind: what is looked for in it, for messages.
        error_type: raised if it does not exist, or running it fails.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise error_type(f"The file {path} of a {kind} does not exist (looked for {file}): give its path.")
    _make_importable(str(file.parent))
    importlib.invalidate_caches()
    name = (
        file.stem if _is_free(file.stem, file) else f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    )
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise error_type(f"The file {path} of a {kind} is not a Python file: give one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise error_type(_failed(str(file), kind, error)) from error
    return module


def _is_free(name: str, file: Path) -> bool:
    """Return whether `import name` means `file`."""
    if not name.isidentifier():
        return False
    if (loaded := sys.modules.get(name)) is not None:
        origin = getattr(loaded, "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
    return origin is not None and Path(origin).resolve() == file


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def file_form(kind: str) -> str:
    """Return how a function of a file is named, for messages: `my_rewards.py:my_reward`."""
    noun = kind.replace(" ", "_").replace("-", "_")
    return f"my_{noun}s.py:my_{noun}"


def _failed(where: str, kind: str, error: BaseException) -> str:
    return f"Importing {where} for a {kind} failed with {type(error).__name__}: {error}; repair it."
