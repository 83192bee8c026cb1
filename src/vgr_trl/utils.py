"""Errors, atomic files, patched attributes, and other small tools that the rest of the package stands on."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import update_wrapper
from importlib.metadata import version
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import yaml
from packaging.version import Version
from yaml.constructor import ConstructorError

# Control characters but line feed and tab, surrogates, characters of private use, line breaks that only some readers
# see, marks of writing direction, and characters that show nothing, in which a text can be hidden; but for those that
# join or select the shapes of their neighbours, as emoji and Persian have them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
    "\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c"
    "\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    """Return `text` with control characters, marks of writing direction and what does not show as `\\x1b`.

    Line feeds stay, tabs too; a carriage return before a line feed is left out. What comes out can neither move the
    cursor of a terminal nor end a line in a reader's eyes only.
    """
    return _HIDDEN.sub(lambda found: _number(found[0]), text.replace("\r\n", "\n"))


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def error_text(error: BaseException, most: int = 200) -> str:
    """Return what an error says, on one line of at most so many characters; its type where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


@dataclass(frozen=True)
class Feature:
    """A feature that is on unless `reason` is set; printed as "on", or "off" and why.

    Attributes:
        reason: why it is off; None: it is on.
    """

    reason: str | None = None

    @property
    def enabled(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "on" if self.reason is None else f"off ({self.reason})"


class VGRError(Exception):
    """Base of every error this library raises on purpose; its text, in which data may be named, can be printed."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(VGRError, ValueError):
    """An option has a value that is not accepted, or contradicts another option."""


class DataError(VGRError, ValueError):
    """A data set, a row or an image cannot be used."""


class MissingSplitError(DataError):
    """A data set has not the split that is asked for, but `splits`."""

    def __init__(self, source: str, splits: Sequence[str], wanted: str) -> None:
        super().__init__(f"{source} has the splits {splits}, but not {wanted!r}: name one of them.")
        self.splits = splits


class RewardError(VGRError, ValueError):
    """A reward cannot be found, loaded or computed from what it was given."""


class UnsupportedTRLError(VGRError, RuntimeError):
    """The installed TRL does not have the methods that this library extends."""


class CollapseError(VGRError, RuntimeError):
    """Training was ended because the run showed signs of collapse."""


class NotFiniteError(VGRError, ArithmeticError):
    """The model returned NaN or infinite values."""


class VLLMServerError(VGRError, ConnectionError):
    """A server of vLLM does not answer, or cannot do what is asked."""


class ProcessError(VGRError, RuntimeError):
    """Another process of the run does not answer, or has ended."""


class DiskFullError(VGRError, OSError):
    """A disk or a quota is full; what was being written is not whole."""


# The words of the system, of PyTorch's writer of archives (which hides those) and of safetensors.
_DISK_FULL = "No space left", "Disk quota exceeded", "StreamWriter failed writing", "unexpected pos", "os error 28"


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, comes from a disk or a quota that is full."""
    while error is not None and not any(text in str(error) for text in _DISK_FULL):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def naming_full_disk(target: str | Path, cure: str = "free space there") -> Iterator[None]:
    """Turn what is raised when the disk is full into a `DiskFullError` that names the file, or else `target`.

    Args:
        target: the file that is written, or the folder of the files.
        cure: what to do, the end of the sentence.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, VGRError) or not is_disk_full(error):
            raise
        path = getattr(error, "filename", None) or target
        raise DiskFullError(f"Disk full while writing {path}: {cure}.") from error


def unfinished(path: Path) -> Path:
    """Return the name under which `path` is written until it is whole; readers of folders pass over such names."""
    return path.with_name(f".{path.name}.unfinished")


def publish(path: Path) -> None:
    """Give the file at `unfinished(path)` its name, once its bytes are on the disk."""
    _sync(unfinished(path))
    unfinished(path).replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `data` to `path`, which is replaced at once or not at all.

    Args:
        path: whose folder is there.
        data: all of it.
        sync: wait until it is on the disk, as nothing written after it can be there before.

    Raises:
        DiskFullError: naming the file.
    """
    try:
        with naming_full_disk(path):
            unfinished(path).write_bytes(data)
            publish(path) if sync else unfinished(path).replace(path)
    finally:
        unfinished(path).unlink(missing_ok=True)


def append_atomic(path: Path, data: bytes, head: bytes = b"") -> None:
    """Append all of `data` to `path`, or nothing if that fails; a missing folder is made.

    Args:
        path: of the file.
        data: all of it.
        head: what stands in front of it in a file that is empty.

    Raises:
        DiskFullError: naming the file.
    """
    with naming_full_disk(path), ExitStack() as opened:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = opened.enter_context(path.open("ab", buffering=0))
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(data if end else head + data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def is_writable(path: Path) -> bool:
    """Return whether a file could be written to `path`, whose folder may be missing yet."""
    if path.is_dir():
        return False
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


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


@contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or object for the duration; an object that had none of its own has none after."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def patched_method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of a method of one object for the duration; copies of the object call their own method.

    Raises:
        ConfigError: another thread has replaced the method; whichever ends first would undo the other's.
    """
    plain = getattr(owner, name)
    if isinstance(plain, _Replacement) and plain.thread != get_ident():
        raise ConfigError(f"Another thread shares prompts in this {type(owner).__name__}: enter share_prompts once.")
    with patched_attribute(owner, name, _Replacement(plain, function)):
        yield


class _Replacement:
    """Looks like the plain method. Copied or pickled with its owner it is that method, of the copy."""

    def __init__(self, plain: Callable[..., Any], function: Callable[..., Any]) -> None:
        update_wrapper(self, plain)
        self.plain, self.function, self.thread = plain, function, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.plain,)


def _itself(value: Any) -> Any:
    return value


_LOST_PROCESS = re.compile(  # what gloo and NCCL say
    "Timed out waiting|timed out after|Application timeout caused pair closure|Watchdog caught collective operation "
    "timeout|before timing out|Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    "ncclRemoteError|remote process exiting prematurely"
)


@contextmanager
def naming_silent_process(timeout: int, step: Callable[[], int]) -> Iterator[None]:
    """Turn what gloo and NCCL raise when another process does not answer into a `ProcessError`.

    NCCL's watchdog may end the process itself, after the same time and with its own words.

    Args:
        timeout: `ddp_timeout`, in seconds.
        step: returns the step in work, counted from 1.

    Raises:
        ProcessError: another process is silent or has ended.
    """
    try:
        yield
    except RuntimeError as error:
        from torch import distributed  # rewards and processes of the report do without torch

        text = str(error)
        is_lost = ("gloo" in text or "NCCL" in text) and _LOST_PROCESS.search(text) is not None
        if not (is_lost and distributed.is_available() and distributed.is_initialized()):
            raise
        raise ProcessError(
            f"Another of the {distributed.get_world_size()} processes has ended, or has not answered for "
            f"ddp_timeout={timeout} seconds, at step {step()}: see what it logged last, or whether it hangs (in a "
            "reward, which reward_timeout names), end them all, and continue with resume_from_checkpoint latest."
        ) from error


SUPPORTED = ("1.15", "1.17")  # from, up to but without; the tests run with these releases


def release(installed: str | None = None) -> Version:
    """Return the release of the installed TRL, or of the version given, without what follows on its numbers."""
    return Version(Version(installed or version("trl")).base_version)


def check_release(installed: str | None = None) -> None:
    """Raise `UnsupportedTRLError` unless the tests run with the release of TRL.

    Args:
        installed: version of TRL, that of the installed package by default.
    """
    first, end = SUPPORTED
    if not Version(first) <= release(installed) < Version(end):
        tested, found = f"trl>={first},<{end}", installed or version("trl")
        raise UnsupportedTRLError(f'TRL {found} is installed, but vgr_trl needs another: pip install "{tested}".')


def pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that import again, and that end with the process that started them, not before.

    A scheduler's SIGTERM, or Ctrl-C, goes to them as well; what becomes of their work is for that process to say.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=belong_to_parent)


def initialise_loader(initialise: Callable[[int], None] | None, worker: int) -> None:
    """Let a data loader's worker end with the process that started it, not before, then call its own `worker_init_fn`.

    PyTorch's watch of the parent does not end a worker that waits for its full queue to be read.
    """
    belong_to_parent()
    if initialise is not None:
        initialise(worker)


def kill_workers(executor: ProcessPoolExecutor) -> None:
    """End the processes of a pool in the midst of what they do, which the end of the interpreter would wait for."""
    for process in list((executor._processes or {}).values()):
        process.kill()


def belong_to_parent() -> None:
    """Exit with the parent process, or this worker hangs for ever.

    Signals are passed over by a function, since what this process starts would inherit that they are ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def limit_seconds(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` when the process has computed for `seconds` in this block, and again should it be caught.

    The limit is of computing time, so that it does not depend on what else runs. Python handles signals in its main
    thread alone: in other threads there is no limit. A single call of C code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


MAX_YAML_NODES = 100_000  # with aliases written out


class StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, and aliases that would be written out without end."""

    def get_single_node(self) -> Any:
        """Return the document, or raise `ConstructorError` if it is too large with its aliases written out."""
        document = super().get_single_node()
        waiting, seen = [document], 0
        while waiting:
            node, seen = waiting.pop(), seen + 1
            if seen > MAX_YAML_NODES:
                raise ConstructorError(None, None, f"its aliases repeat more than {MAX_YAML_NODES} values", None)
            for part in node.value if isinstance(node, yaml.CollectionNode) else ():
                waiting += part if isinstance(part, tuple) else [part]
        return document

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, or raise `ConstructorError` for a key given twice."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str":
                if key.value in seen:
                    raise ConstructorError(None, None, f"the key {key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says, or raise `yaml.YAMLError`."""
    return yaml.load(text, StrictLoader)  # a safe loader
