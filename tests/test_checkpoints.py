"""What processes keep of their own in a checkpoint."""

import pytest

from vgr_trl.checkpoints import load_shares, missing_shares, save_share
from vgr_trl.errors import ConfigError


def test_shares_come_back_in_the_order_of_their_processes(tmp_path):
    for process in (10, 2, *range(3, 10), 0, 1, 11):
        save_share({"process": process}, tmp_path, process, 12)
    assert missing_shares(tmp_path) is None
    assert [share["process"] for share in load_shares(tmp_path)] == list(range(12))


def test_shares_of_a_run_that_was_killed_while_saving_do_not_stay(tmp_path):
    """It had two processes, of which one had saved; the run that goes on has one, or three."""
    for processes in (1, 3):
        save_share({"process": "other"}, tmp_path, 1, 2)
        for process in range(processes):
            save_share({"process": process}, tmp_path, process, processes)
        assert missing_shares(tmp_path) is None
        assert [share["process"] for share in load_shares(tmp_path)] == list(range(processes))


def test_a_share_that_was_cut_off(tmp_path):
    save_share({"numbers": list(range(99))}, tmp_path, 0, 1)
    (share,) = tmp_path.iterdir()
    share.write_bytes(share.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"A share of the replay buffer in .* cannot be read \(\w+\): give an"):
        load_shares(tmp_path)
