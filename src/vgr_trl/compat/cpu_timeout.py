"""`ddp_timeout` on a CPU, where transformers 5.23 does not hand it to the process group: it stays at 30 minutes."""

from datetime import timedelta

from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout


def give_timeout(seconds: int) -> None:
    """Let processes that talk by gloo wait for each other as long as `ddp_timeout` says."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        _set_pg_timeout(timedelta(seconds=seconds))
