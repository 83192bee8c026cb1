"""Options that differ between the processes of one run are refused on all of them."""

import os

import pytest
from support.launching import results_of
from support.trainers import config

from vgr_trl.patches.transformers import close_group_at_exit
from vgr_trl.utils import ConfigError
from vgr_trl.validate.options import refuse_differing_options


def differ(folder):
    """Give this process other options than the other one."""
    rank = int(os.environ["RANK"])
    close_group_at_exit()
    refuse_differing_options(config(folder / str(rank), run_name=str(rank)))
    with pytest.raises(ConfigError):
        refuse_differing_options(config(folder, num_generations=[4, 2][rank]))


def test_options_that_differ_are_named_by_all_processes(tmp_path):
    results_of(differ, tmp_path, processes=2)
