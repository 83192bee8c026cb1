"""Which errors of gloo and NCCL say that another process is silent or gone."""

import pytest
from torch import distributed

from vgr_trl.errors import ProcessError
from vgr_trl.processes import naming_silent_process


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800ms for recv operation", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 60 ms", True),
        ("NCCL error in: ProcessGroupNCCL.cpp, ncclRemoteError: A call failed possibly due to", True),
        ("NCCL error in: ProcessGroupNCCL.cpp, ncclInvalidUsage: This usually reflects invalid usage", False),
        ("CUDA out of memory. Connection refused", False),
    ],
)
def test_errors_of_backends(message, is_lost, monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError) as raised, naming_silent_process(60, lambda: 4):
        raise RuntimeError(message)
    if is_lost:
        assert isinstance(raised.value, ProcessError)
        assert "2 processes has ended, or has not answered for ddp_timeout=60 seconds, at step 4" in str(raised.value)
    else:
        assert str(raised.value) == message
