"""The errors of this library: one family, and every member is also the built-in that callers expect."""

from vgr_trl.printable import printable


def words_of(error: BaseException, most: int = 200) -> str:
    """Return what an error says, on one line of at most so many characters; its type where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


class VGRError(Exception):
    """Base of every error this library raises on purpose; its text, in which data may be named, can be printed."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(VGRError, ValueError):
    """An option has a value that is not accepted, or contradicts another option."""


class DataError(VGRError, ValueError):
    """A data set, a row or an image cannot be used."""


class MissingSplitError(DataError):
    """A data set has not the split that is asked for."""


class RewardError(VGRError, ValueError):
    """A reward cannot be found, loaded or computed from what it was given."""


class UnsupportedTRLError(VGRError, RuntimeError):
    """The installed TRL does not have the methods that this library extends."""


class CollapseError(VGRError, RuntimeError):
    """Training was ended because the run showed signs of collapse."""


class NotFiniteError(VGRError, ArithmeticError):
    """What the model computes is NaN or infinite, so that it cannot be trained on."""


class VLLMServerError(VGRError, ConnectionError):
    """A server of vLLM does not answer, or cannot do what is asked."""


class ProcessError(VGRError, RuntimeError):
    """Another process of the run does not answer, or has ended."""


class DiskFullError(VGRError, OSError):
    """A disk or a quota is full; what was being written is not whole."""
