"""Supported releases of TRL, and the build of torchvision that a processor needs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
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


def check_release(installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` for a release of TRL without tests.

    Args:
        installed: version of TRL; None: the installed package's.
    """
    first, end = SUPPORTED_TRL
    if not Version(first) <= release(installed) < Version(end):
        tested, found = f"trl>={first},<{end}", installed or version("trl")
        raise UnsupportedTRLError(f'TRL {found} is installed, but vgr_trl needs another: pip install "{tested}".')
