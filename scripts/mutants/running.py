"""Tests run in a fork of this process, which has the heavy packages loaded: what they call, and whether they notice."""

import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

QUIET = ("-q", "-x", "-p", "no:cacheprovider", "--no-header")
OUTPUT = "output-of-tests.txt"
PATIENCE = 10


def load_packages() -> None:
    """Import what every test imports, but nothing of this library."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True  # a mutant may be as long and as old as the file it replaces
    for name in ("datasets", "peft", "PIL.Image", "trl.trainer.grpo_trainer"):
        import_module(name)
    import_module("torch").set_num_threads(1)
    # A slow machine would look like a test that has noticed something.
    settings.register_profile("mutants", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("mutants")


@dataclass
class Calls:
    """What tests call: `tests[file, first line of a function]` are those that call it; `seconds` they take."""

    tests: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)

    def reaching(self, file: str, function: int) -> list[str]:
        """Tests that call the function, else any of its file, else all (imports call too); the quickest first."""
        of_file = {key: tests for key, tests in self.tests.items() if key[0] == file}
        found = of_file.get((file, function)) or set().union(*of_file.values()) or set(self.seconds)
        return sorted(found, key=lambda test: self.seconds.get(test, 0.0))


class Recorder:
    """A plugin of pytest that fills `Calls`."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = f"{root}{os.sep}", Calls()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        def trace(frame: Any, event: str, arg: Any) -> None:
            if (name := frame.f_code.co_filename).startswith(self.root):
                self.calls.tests[name[len(self.root) :], frame.f_code.co_firstlineno].add(item.nodeid)

        started = time.monotonic()
        sys.settrace(trace)
        threading.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.calls.seconds[item.nodeid] = time.monotonic() - started


def record_calls(root: Path, tests: Iterable[str]) -> Calls:
    """Run tests of the tree at `root` as they are; an error if one fails."""
    with tempfile.NamedTemporaryFile() as file:

        def record() -> int:
            recorder = Recorder(root / "src")
            code = int(pytest.main([*QUIET, *tests], plugins=[recorder]))
            recorder.calls.tests = dict(recorder.calls.tests)
            Path(file.name).write_bytes(pickle.dumps(recorder.calls))
            return code

        if (code := in_a_fork(root, record, 3600)) != 0:
            said = (root / OUTPUT).read_text("utf-8", errors="replace")[-3000:]
            raise SystemExit(f"{said}\nThe tests of {', '.join(tests)} end with {code} before anything is changed.")
        return pickle.loads(Path(file.name).read_bytes())


def notice(root: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether one of the tests fails, or does not end in time."""
    return in_a_fork(root, lambda: int(pytest.main([*QUIET, *tests])), seconds) != 0


def in_a_fork(root: Path, work: Callable[[], int], seconds: float) -> int | None:
    """Return what `work` returns in a process of its own that imports from `root`; None if it does not end.

    It may use `seconds` of a processor, and `PATIENCE` times as long where it waits or the machine is busy.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(root / OUTPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (0, 1, 2):
            os.dup2(output, stream)
        os.chdir(root)
        sys.path.insert(0, str(root / "src"))
        os.environ["PYTHONPATH"] = str(root / "src")
        resource.setrlimit(resource.RLIMIT_CPU, (round(seconds), round(seconds)))
        code = 3
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
