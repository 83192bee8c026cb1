import json
import os

import pytest
import torch
import transformers.trainer
from accelerate import Accelerator
from filelock import FileLock

from vgr_trl.atomic_files import unfinished
from vgr_trl.checkpoints import LOCK, MANIFEST, complete_checkpoint, load_shares, save_share
from vgr_trl.errors import ConfigError, DiskFullError


def test_shares_of_a_run_that_was_killed_while_saving_do_not_stay(tmp_path):
    """It had two processes, of which one had saved; the run that goes on has one, or three."""
    for processes in (1, 3):
        save_share({"process": "other"}, tmp_path, 1, 2, "replay")
        with pytest.raises(ConfigError, match="files .* cannot be read"):
            load_shares(tmp_path, "replay")
        with complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
            for process in range(processes):
                save_share({"process": process}, tmp_path, process, processes, "replay")
        assert [share["process"] for share in load_shares(tmp_path, "replay")] == list(range(processes))
    assert load_shares(tmp_path, "kl") == []


def test_older_checkpoints_are_deleted_once_the_new_one_is_complete(tmp_path, monkeypatch):
    """TRL deletes them before; a kill in between would leave nothing to continue from."""
    happened = []
    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", lambda **options: happened.append(options))
    for file in (tmp_path / MANIFEST, unfinished(tmp_path / MANIFEST)):  # which a kill leaves
        file.write_text("of an earlier save")
    with complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
        assert not (tmp_path / MANIFEST).exists()
        (tmp_path / "optimizer.pt").write_bytes(b"state")
        transformers.trainer.rotate_checkpoints(save_total_limit=1)
        assert not happened
    assert happened == [{"save_total_limit": 1}]
    assert set(json.loads((tmp_path / MANIFEST).read_text())["files"]) == {"optimizer.pt"}


def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "optimizer.pt").symlink_to("/dev/full")
    with (
        pytest.raises(DiskFullError, match=f"^Disk full while writing {tmp_path}: free space"),
        complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True),
    ):
        torch.save({"weights": torch.zeros(1_000_000)}, tmp_path / "optimizer.pt")
    assert not (tmp_path / MANIFEST).exists()


class Program:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_share_with_a_program_is_refused(tmp_path):
    share, ran = tmp_path / "replay_0_of_1.pt", tmp_path / "ran"
    torch.save({"numbers": Program(ran)}, share)
    with pytest.raises(ConfigError, match="The 1 files .* cannot be read"):
        load_shares(tmp_path, "replay")
    assert not ran.exists()
    torch.load(share, weights_only=False)
    assert ran.exists(), "the program would not have run anyway"


def test_a_folder_in_which_another_run_trains_is_refused(text_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("vgr_trl.checkpoints.LOCK_SECONDS", 0)
    trainer = text_trainer(max_steps=1)
    with FileLock(tmp_path / "run" / LOCK), pytest.raises(ConfigError, match="Another run is training in"):
        trainer.train()
    trainer.train()
    text_trainer(max_steps=1).train()
