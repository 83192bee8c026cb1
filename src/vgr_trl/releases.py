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
def naming_torchvision(model: str) -> Iterator[None]:
    """Convert the errors of transformers about a missing torchvision into a `ConfigError`."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if re.search("torchvision|_extra_content", str(error), re.IGNORECASE) is None:
            raise
        build = f"torch {version('torch')} (pip install torch torchvision)"
        raise ConfigError(f"The processor of {model} needs torchvision: install the build for {build}.") from error


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
