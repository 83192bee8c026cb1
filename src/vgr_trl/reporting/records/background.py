"""Jobs that run one after the other in a thread, so that training does not wait for a disk."""

import atexit
import queue
import threading
from collections.abc import Callable

from transformers.utils import logging

logger = logging.get_logger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs in their order, in a thread that starts with the first and that `close` ends.

    A job that fails is left out, and so is one that comes while too many wait; the first of either is warned of. At the
    end of the interpreter, also after an exception, what waits is run.

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
        self.what, self.patience, self.at_exit = what, patience, at_exit
        self.failed = False
        self.dropped = 0
        self._queue: queue.Queue[Job | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Let `job` run when those before it are done; leave it out if too many wait."""
        self._start()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning(
                    f"{self.what} are made faster than they can be written, so some are left out: log less often, or "
                    "to a faster disk."
                )

    def flush(self) -> None:
        """Wait until every job so far is done."""
        if self._thread is None:
            return
        done = threading.Event()
        try:
            self._queue.put(done.set, timeout=self.patience)
        except queue.Full:
            return
        done.wait(self.patience)

    def close(self) -> None:
        """Wait until every job is done, and end the thread; a later job starts another."""
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

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:  # whatever it is, it must not end the training that it describes
                if not self.failed:
                    self.failed = True
                    logger.warning(
                        f"{self.what} cannot be written ({type(error).__name__}: {error}); training goes on, and so do "
                        "the attempts."
                    )
            del job  # or what it holds would live until the next one comes
