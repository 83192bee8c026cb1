"""What processes keep of their own in a checkpoint."""

import json

import pytest
import torch
import transformers.trainer
from accelerate import Accelerator

from vgr_trl.checkpoints import MANIFEST, load_shares, missing_shares, save_share, whole_checkpoint, write_manifest
from vgr_trl.utils import ConfigError, DiskFullError


def test_shares_come_back_in_the_order_of_their_processes(tmp_path):
    for process in (10, 2, *range(3, 10), 0, 1, 11):
        save_share({"process": process}, tmp_path, process, 12, "choice")
    assert missing_shares(tmp_path, "choice") is None
    assert [share["process"] for share in load_shares(tmp_path, "choice")] == list(range(12))


def test_shares_of_a_run_that_was_killed_while_saving_do_not_stay(tmp_path):
    """It had two processes, of which one had saved; the run that goes on has one, or three."""
    for processes in (1, 3):
        save_share({"process": "other"}, tmp_path, 1, 2, "choice")
        for process in range(processes):
            save_share({"process": process}, tmp_path, process, processes, "choice")
        assert missing_shares(tmp_path, "choice") is None
        assert [share["process"] for share in load_shares(tmp_path, "choice")] == list(range(processes))


def test_a_share_that_was_cut_off(tmp_path):
    save_share({"numbers": list(range(99))}, tmp_path, 0, 1, "choice")
    (share,) = tmp_path.iterdir()
    share.write_bytes(share.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"A share of the replay buffer in .* cannot be read \(\w+\): give an"):
        load_shares(tmp_path, "choice")


def test_older_checkpoints_are_deleted_once_the_new_one_is_complete(tmp_path, monkeypatch):
    """TRL deletes them before; a kill in between would leave nothing to continue from."""
    happened = []
    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", lambda **options: happened.append(options))
    (tmp_path / MANIFEST).write_text("of an earlier save")
    with whole_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
        assert not (tmp_path / MANIFEST).exists()
        (tmp_path / "optimizer.pt").write_bytes(b"state")
        transformers.trainer.rotate_checkpoints(save_total_limit=1)
        assert not happened
    assert happened == [{"save_total_limit": 1}]
    assert set(json.loads((tmp_path / MANIFEST).read_text())["files"]) == {"optimizer.pt"}


def test_a_checkpoint_that_is_rewritten_and_interrupted_has_no_manifest(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"before")
    write_manifest(tmp_path)
    with pytest.raises(KeyboardInterrupt), whole_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
        raise KeyboardInterrupt
    assert not (tmp_path / MANIFEST).exists()


def test_a_full_disk_is_named(tmp_path):
    """`/dev/full` refuses every byte, as a full disk does."""
    (tmp_path / "optimizer.pt").symlink_to("/dev/full")
    with (
        pytest.raises(DiskFullError, match=f"^Disk full while writing {tmp_path / 'optimizer.pt'}: free space"),
        whole_checkpoint(tmp_path, Accelerator(cpu=True), writes=True),
    ):
        torch.save({"weights": torch.zeros(1_000_000)}, tmp_path / "optimizer.pt")
    assert not (tmp_path / MANIFEST).exists()


def test_other_errors_of_a_save_stay_what_they_are(tmp_path):
    with (
        pytest.raises(RuntimeError, match="of the user's callback") as caught,
        whole_checkpoint(tmp_path, Accelerator(cpu=True), writes=True),
    ):
        raise RuntimeError("of the user's callback")
    assert not isinstance(caught.value, DiskFullError)
