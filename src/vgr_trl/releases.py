"""Supported releases of TRL, and the build of torchvision that a processor needs."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version

from packaging.version import Version

from vgr_trl.errors import ConfigError, UnsupportedTRLError


@contextmanager
def naming_torchvision(model: str | None = None) -> Iterator[None]:
    """Convert the errors of a missing torchvision, or of one that was built for another torch, into a `ConfigError`.

    Args:
        model: whose processor the block loads; None: only a torchvision that cannot be imported is meant.
    """
    try:
        yield
    except (ImportError, AttributeError, RuntimeError) as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        text, build = " ".join(map(str, causes)), f"torch {version('torch')}"
        if re.search("torchvision::|custom C\\+\\+ ops", text):  # transformers hides it behind its own ImportError
            cure = "uv pip install --reinstall torch torchvision --torch-backend auto (pip install uv)"
            raise ConfigError(f"The installed torchvision is not the build for {build}: {cure}.") from error
        if model is None or re.search("torchvision|_extra_content", text, re.IGNORECASE) is None:
            raise
        cure = f"install the build for {build} (pip install torch torchvision)"
        raise ConfigError(f"The processor of {model} needs torchvision: {cure}.") from error


SUPPORTED_TRL = ("1.15", "1.17")  # first release, and first unsupported release; the tests run with all between


def release(installed: str | None = None) -> Version:
    """Return the numbers of a version, by default of the installed TRL, without suffixes."""
    return Version(Version(installed or version("trl")).base_version)


@cache
def check_release(installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` for a release of TRL without tests; warn once of a newer one with VGR_TRL_UNTESTED=1.

    Args:
        installed: version of TRL; None: the installed package's.
    """
    first, end = SUPPORTED_TRL
    if Version(first) <= release(installed) < Version(end):
        return
    tested, found = f"trl>={first},<{end}", f"TRL {installed or version('trl')} is installed, but vgr_trl"
    is_newer = release(installed) >= Version(end)
    if is_newer and os.environ.get("VGR_TRL_UNTESTED") == "1":
        warnings.warn(f"{found} is tested with {tested} only: results may be wrong in silence.", stacklevel=2)
        return
    trial = ", or set VGR_TRL_UNTESTED=1 to try it untested" if is_newer else ""
    raise UnsupportedTRLError(f'{found} needs another: pip install "{tested}"{trial}.')
