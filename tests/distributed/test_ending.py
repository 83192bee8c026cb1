"""Processes of one run: options that differ are refused on all of them, and each closes its group before it ends."""

import os
import subprocess
import sys

import pytest
from support.launching import results_of
from support.trainers import config

from vgr_trl.errors import ConfigError
from vgr_trl.patches.transformers import close_group_at_exit
from vgr_trl.validate.options import refuse_differing_options


def differ(folder):
    """Give this process other options than the other one."""
    rank = int(os.environ["RANK"])
    close_group_at_exit()
    refuse_differing_options(config(folder / str(rank), run_name=str(rank)))
    with pytest.raises(ConfigError, match="num_generations is 4 in process 0 and 2 in process 1"):
        refuse_differing_options(config(folder, num_generations=[4, 2][rank]))


def test_options_that_differ_are_named_by_all_processes(tmp_path):
    results_of(differ, tmp_path, processes=2)


SCRIPT = """
import atexit
from torch import distributed
from vgr_trl.patches.transformers import close_group_at_exit

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("open" if distributed.is_initialized() else "closed"))  # runs after the next one
close_group_at_exit()
close_group_at_exit()
distributed.all_gather_object([None], "last words")
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("", 0, "closed"),
        pytest.param("raise SystemExit(3)", 3, "closed", marks=pytest.mark.minutes),
        pytest.param("distributed.destroy_process_group()", 0, "closed", marks=pytest.mark.minutes),
        ("raise ValueError('while others wait in a collective')", 1, "open"),
    ],
)
def test_the_group_is_closed_at_exit_unless_the_process_failed(end, status, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout.split()) == (status, [said]), done.stderr
