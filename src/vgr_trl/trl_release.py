"""Which releases of TRL this library extends; asked before anything of TRL is imported."""

from importlib.metadata import version

from packaging.version import Version

from vgr_trl.errors import UnsupportedTRLError

SUPPORTED = ("1.15", "1.17")  # from, up to but without; the tests run with these releases
CURE = f'install one of those: pip install "trl>={SUPPORTED[0]},<{SUPPORTED[1]}".'


def release(installed: str | None = None) -> Version:
    """Return the release of the installed TRL, or of the version given, without what follows on its numbers."""
    return Version(Version(installed or version("trl")).base_version)


def supported(installed: str | None = None) -> str:
    """Return the beginning of a sentence about the installed TRL."""
    return (
        f"TRL {installed or version('trl')} is installed, but vgr_trl is tested with trl>={SUPPORTED[0]},"
        f"<{SUPPORTED[1]}"
    )


def check_release(installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` unless the tests run with the release of TRL.

    Args:
        installed: version of TRL, that of the installed package by default.
    """
    first, end = map(Version, SUPPORTED)
    if not first <= release(installed) < end:
        raise UnsupportedTRLError(f"{supported(installed)}; {CURE}")
