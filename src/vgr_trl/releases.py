"""Supported releases of TRL, and the build of torchvision that a processor needs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from packaging.version import Version

from vgr_trl.errors import ConfigError, UnsupportedTRLError


@contextmanager
def naming_torchvision(model: str) -> Iterator[None]:
    """Turn what transformers raises for a processor that lacks torchvision into a `ConfigError`."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if re.search("torchvision|_extra_content", str(error), re.IGNORECASE) is None:
            raise
        build = f"torch {version('torch')} (pip install torch torchvision)"
        raise ConfigError(f"The processor of {model} needs torchvision: install the build for {build}.") from error


SUPPORTED_TRL = ("1.15", "1.17")  # from, up to but without; the tests run with these releases


def release(installed: str | None = None) -> Version:
    """Return the release of the installed TRL, or of the version given, without what follows on its numbers."""
    return Version(Version(installed or version("trl")).base_version)


def check_release(installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` unless the tests run with the release of TRL.

    Args:
        installed: version of TRL, that of the installed package by default.
    """
    first, end = SUPPORTED_TRL
    if not Version(first) <= release(installed) < Version(end):
        tested, found = f"trl>={first},<{end}", installed or version("trl")
        raise UnsupportedTRLError(f'TRL {found} is installed, but vgr_trl needs another: pip install "{tested}".')
