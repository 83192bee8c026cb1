"""Jobs that run one after the other in a thread, so that training does not wait for a disk."""

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable

from transformers.utils import logging

from vgr_trl.errors import VGRError

logger = logging.get_logger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs in their order, in a thread that starts with the first and that `close` ends.

    A job that a disk refuses (`OSError`) waits, and those behind it, until the next one comes, then is run again. A job
    that fails otherwise is left out, as is the oldest where too many wait. The first failure of each kind is warned of,
    and at the end how many were left out. At the end of the interpreter, also after an exception, what waits is run.

    Args:
        what: the jobs write, for the warning.
        most_waiting: jobs that may wait.
        patience: seconds that `flush` and `close` wait for a disk that does not answer.
        at_exit: returns what is called at the end of the interpreter, or None as a weak reference does; by default it
            is `close`.
    """

    def __init__(
        self,
        what: str,
        most_waiting: int = 64,
        patience: float = 60.0,
        at_exit: Callable[[], Job | None] = lambda: None,
    ) -> None:
        self.what, self.most_waiting, self.patience, self.at_exit = what, most_waiting, patience, at_exit
        self.left_out = 0
        self._said: set[str] = set()
        self._queue: queue.Queue[Job | threading.Event | None] = queue.Queue(most_waiting)
        self._refused: deque[Job] = deque()  # by a disk; only the thread touches it
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Let `job` run when those before it are done; leave it out if too many wait."""
        self._start()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self.left_out += 1
            self._warn(
                "too fast",
                f"{self.what} are made faster than they can be written, so some are left out: log less often, or "
                "to a faster disk.",
            )

    def flush(self) -> None:
        """Wait until every job so far is done, or refused by a disk."""
        if self._thread is None:
            return
        done = threading.Event()
        try:
            self._queue.put(done, timeout=self.patience)
        except queue.Full:
            return
        done.wait(self.patience)

    def close(self) -> None:
        """Wait until every job is done, end the thread, and say what is lost; a later job starts another."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=self.patience)
        except queue.Full:
            return
        self._thread.join(self.patience)
        if not self._thread.is_alive():
            self._thread = None
            atexit.unregister(self._exit)

    def _exit(self) -> None:
        (self.at_exit() or self.close)()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="vgr_trl-records", daemon=True)
            self._thread.start()
            atexit.unregister(self._exit)
            atexit.register(self._exit)

    # In the thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if not isinstance(job, threading.Event):
                self._refused.append(job)
            self._work_off()
            if isinstance(job, threading.Event):
                job.set()
            del job  # or what it holds would live until the next one comes
        self._work_off()
        self._say_what_is_lost()

    def _work_off(self) -> None:
        while self._refused:
            try:
                self._refused[0]()
            except OSError as error:
                self._warn(
                    type(error).__name__,
                    f"{self.what} cannot be written ({_words(error)}); training goes on, and they are written as soon "
                    "as they can be.",
                )
                if len(self._refused) <= self.most_waiting:
                    return
                self.left_out += 1
            except Exception as error:  # whatever it is, it must not end the training that it describes
                self.left_out += 1
                self._warn(
                    type(error).__name__,
                    f"{self.what} cannot be written ({_words(error)}); training goes on without this one.",
                )
            self._refused.popleft()

    def _say_what_is_lost(self) -> None:
        lost = self.left_out + len(self._refused)
        if lost:
            logger.warning(f"{self.what}: {lost} of what was to be written is lost; the warnings before say why.")
        self._refused.clear()
        self.left_out = 0

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(message)


def _words(error: Exception) -> str:
    return str(error).rstrip(".") if isinstance(error, VGRError) else f"{type(error).__name__}: {error}"
