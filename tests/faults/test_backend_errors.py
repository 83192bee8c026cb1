"""Which errors of gloo and NCCL say that another process is silent or gone."""

import pytest
from torch import distributed

from vgr_trl.utils import ProcessError, naming_silent_process


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800ms for recv operation",
            "has not answered for",
        ),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 60 ms",
            "has not answered for",
        ),
        ("NCCL error in: ProcessGroupNCCL.cpp, ncclRemoteError: A call failed possibly due to", "has ended"),
        ("NCCL error in: ProcessGroupNCCL.cpp, ncclInvalidUsage: This usually reflects invalid usage", None),
        ("CUDA out of memory. Connection refused", None),
    ],
)
def test_errors_of_backends(message, said, monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError) as raised, naming_silent_process(60, lambda: 4):
        raise RuntimeError(message)
    if said is None:
        assert str(raised.value) == message
    else:
        assert isinstance(raised.value, ProcessError)
        assert f"Another of the 2 processes {said}" in str(raised.value)
        assert "at step 4" in str(raised.value)
