"""What the other processes of a run do when one is silent or has ended, in words that say what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import distributed

from vgr_trl.errors import ProcessError

_SILENT = ("Timed out waiting", "timed out after", "Application timeout caused pair closure")
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


@contextmanager
def silence_named(timeout: int, step: Callable[[], int]) -> Iterator[None]:
    """Turn what gloo raises when another process does not answer into a `ProcessError`.

    NCCL ends the process itself, after the same time and with its own words.

    Args:
        timeout: `ddp_timeout`, in seconds.
        step: asked for the step at hand, counted from 1.

    Raises:
        ProcessError: another process is silent or has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if not (distributed.is_available() and distributed.is_initialized() and "gloo" in str(error)):
            raise
        others = f"of the {distributed.get_world_size()} processes"
        if any(words in str(error) for words in _SILENT):
            raise ProcessError(
                f"Another {others} has not answered for ddp_timeout={timeout} seconds at step {step()}: see whether it "
                "is stopped or hangs (in a reward, which reward_timeout would end), end them all, and continue with "
                "resume_from_checkpoint latest; raise ddp_timeout if a process may take longer than that."
            ) from error
        if any(words in str(error) for words in _GONE):
            raise ProcessError(
                f"Another {others} has ended at step {step()}: what it said last is the reason; end them all, and "
                "continue with resume_from_checkpoint latest."
            ) from error
        raise
