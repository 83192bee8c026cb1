"""Errors that this library raises on purpose, printable texts, and the supported releases of TRL."""

import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from traceback import format_exception

from packaging.version import Version

# Control characters except line feed and tab, surrogates, private-use characters, line breaks that only some readers
# see, marks of writing direction, and invisible characters, which can hide a text. Characters that join or select the
# shapes of their neighbours stay: emoji and Persian need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
    "\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c"
    "\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    """Escape control characters, marks of writing direction and invisible characters of a text, as `\\x1b`.

    Line feeds and tabs stay, a carriage return before a line feed is dropped. The result cannot move the cursor of a
    terminal, nor show a line break that is none.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\\x0d")
    return _HIDDEN.sub(lambda hidden: ascii(hidden[0])[1:-1], text)


def error_text(error: BaseException, most: int = 200) -> str:
    """Return the message of an error on one line of at most `most` characters, or its type without a message."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def did_you_mean(name: str, candidates: Collection[str]) -> str:
    """Return ` Did you mean NAME?` with the known name that differs least, in one or two letters; else nothing."""
    edits = {option: count_edits(name, option) for option in candidates if abs(len(option) - len(name)) <= MOST_EDITS}
    nearest = min(edits, key=lambda option: edits[option], default="")
    is_near = edits.get(nearest, MOST_EDITS + 1) <= min(MOST_EDITS, len(name.strip("-")) // 3)
    return f" Did you mean {nearest}?" if is_near else ""


MOST_EDITS = 2


def count_edits(first: str, second: str) -> int:
    """Return the Levenshtein distance: insertions, deletions and replacements of letters between two names."""
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, row = row, [i]
        for j, mate in enumerate(second):
            row.append(min(before[j] + (letter != mate), before[j + 1] + 1, row[j] + 1))
    return row[-1]


class VGRError(Exception):
    """Base of every error that this library raises on purpose; its text, which may quote data, is printable."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(VGRError, ValueError):
    """An option has a value that is not accepted, or contradicts another option."""


class DataError(VGRError, ValueError):
    """A data set, a row or an image cannot be used."""


CURE = "name one with --dataset_train_split or --dataset_test_split (--split of data commands)"


class MissingSplitError(DataError):
    """A data set does not have the requested split, but `splits`."""

    def __init__(self, source: str, splits: Sequence[str], wanted: str) -> None:
        super().__init__(f"{source} has the splits {splits}, but not {wanted!r}: {CURE}.")
        self.splits = splits


class MissingIdsError(DataError):
    """None of the requested ids is in a set."""


class RewardError(VGRError, ValueError):
    """A reward cannot be found, loaded or computed from its arguments."""


class UnsupportedTRLError(VGRError, RuntimeError):
    """The installed TRL lacks methods that this library extends."""


class CollapseError(VGRError, RuntimeError):
    """Training was ended because the run showed signs of collapse."""


class EvaluationStopped(Exception):
    """Ends an evaluation between two batches, after SIGTERM; training catches it."""


class NotFiniteError(VGRError, ArithmeticError):
    """The model returned NaN or infinite values."""


class EngineError(VGRError, RuntimeError):
    """An engine returns other log-probabilities than the trainer computes."""


class VLLMServerError(VGRError, ConnectionError):
    """A vLLM server does not answer, or cannot serve a request."""


class ProcessError(VGRError, RuntimeError):
    """Another process of the run does not answer, or has ended."""


class DiskFullError(VGRError, OSError):
    """A disk or a quota is full; the file being written is incomplete."""


@contextmanager
def naming_torchvision(model: str | None = None) -> Iterator[None]:
    """Convert errors about a torchvision that is missing, or built for another torch, into a `ConfigError`.

    Args:
        model: model whose processor the block loads; None: only a torchvision that cannot be imported is meant.
    """
    try:
        yield
    except (ImportError, AttributeError, RuntimeError) as error:
        text, build = "".join(format_exception(error, limit=0)), f"torch {version('torch')}"
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
def check_release() -> None:
    """Raise `UnsupportedTRLError` for a TRL without tests; warn once of a newer one with VGR_TRL_UNTESTED=1."""
    first, end = SUPPORTED_TRL
    if Version(first) <= release() < Version(end):
        return
    tested, installed = f"trl>={first},<{end}", f"TRL {version('trl')} is installed, but vgr_trl"
    is_newer = release() >= Version(end)
    if is_newer and os.environ.get("VGR_TRL_UNTESTED") == "1":
        warnings.warn(f"{installed} is tested with {tested} only: results may be wrong in silence.", stacklevel=2)
        return
    trial = ", or set VGR_TRL_UNTESTED=1 to try it untested" if is_newer else ""
    raise UnsupportedTRLError(f'{installed} needs another: pip install "{tested}"{trial}.')
