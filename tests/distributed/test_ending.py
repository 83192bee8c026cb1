"""A process of several closes its group before the interpreter shuts down."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit
from torch import distributed
from vgr_trl.compat.gloo_exit import close_group_at_exit

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("open" if distributed.is_initialized() else "closed"))  # runs after the next one
close_group_at_exit()
close_group_at_exit()
distributed.all_gather_object([None], "last words")
"""

HELD = """
import time, torch

class Slow:
    def __del__(self):
        time.sleep(0.1)

kept = distributed.group.WORLD
tensor = torch.ones(1)
tensor.note = Slow()
work = distributed.all_reduce(tensor, async_op=True)
del tensor, work
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("", 0, "closed"),
        ("raise SystemExit(3)", 3, "closed"),
        ("distributed.destroy_process_group()", 0, "closed"),
        ("raise ValueError('while others wait in a collective')", 1, "open"),
    ],
)
def test_the_group_is_closed_at_exit_unless_the_process_failed(end, status, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout.split()) == (status, [said]), done.stderr


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("distributed.destroy_process_group()", 0, "closed"), ("raise ValueError('a reward failed')", 1, "open")],
)
def test_what_gloo_still_frees_is_freed_before_the_interpreter_ends(end, status, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT + HELD + end], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout.split()) == (status, [said]), done.stderr
