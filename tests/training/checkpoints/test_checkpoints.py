"""What processes keep of their own in a checkpoint; files that would run a program when they are read are refused."""

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import transformers.trainer
from accelerate import Accelerator

from vgr_trl.checkpoints import MANIFEST, complete_checkpoint, load_shares, missing_shares, save_share, write_manifest
from vgr_trl.utils import ConfigError, DiskFullError


def test_shares_come_back_in_the_order_of_their_processes(tmp_path):
    for process in (10, 2, *range(3, 10), 0, 1, 11):
        save_share({"process": process}, tmp_path, process, 12, "replay")
    assert missing_shares(tmp_path, "replay") is None
    assert [share["process"] for share in load_shares(tmp_path, "replay")] == list(range(12))


def test_shares_of_a_run_that_was_killed_while_saving_do_not_stay(tmp_path):
    """It had two processes, of which one had saved; the run that goes on has one, or three."""
    for processes in (1, 3):
        save_share({"process": "other"}, tmp_path, 1, 2, "replay")
        with complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
            for process in range(processes):
                save_share({"process": process}, tmp_path, process, processes, "replay")
        assert missing_shares(tmp_path, "replay") is None
        assert [share["process"] for share in load_shares(tmp_path, "replay")] == list(range(processes))


def test_older_checkpoints_are_deleted_once_the_new_one_is_complete(tmp_path, monkeypatch):
    """TRL deletes them before; a kill in between would leave nothing to continue from."""
    happened = []
    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", lambda **options: happened.append(options))
    (tmp_path / MANIFEST).write_text("of an earlier save")
    with complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
        assert not (tmp_path / MANIFEST).exists()
        (tmp_path / "optimizer.pt").write_bytes(b"state")
        transformers.trainer.rotate_checkpoints(save_total_limit=1)
        assert not happened
    assert happened == [{"save_total_limit": 1}]
    assert set(json.loads((tmp_path / MANIFEST).read_text())["files"]) == {"optimizer.pt"}


def test_a_checkpoint_that_is_rewritten_and_interrupted_has_no_manifest(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"before")
    write_manifest(tmp_path)
    with pytest.raises(KeyboardInterrupt), complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True):
        raise KeyboardInterrupt
    assert not (tmp_path / MANIFEST).exists()


def test_a_full_disk_is_named(tmp_path):
    """`/dev/full` refuses every byte, as a full disk does."""
    (tmp_path / "optimizer.pt").symlink_to("/dev/full")
    with (
        pytest.raises(DiskFullError, match=f"^Disk full while writing {tmp_path / 'optimizer.pt'}: free space"),
        complete_checkpoint(tmp_path, Accelerator(cpu=True), writes=True),
    ):
        torch.save({"weights": torch.zeros(1_000_000)}, tmp_path / "optimizer.pt")
    assert not (tmp_path / MANIFEST).exists()


SOURCES = Path(__file__).parents[3] / "src"
READ_CODE = {
    "pickle.load",
    "pickle.loads",
    "joblib.load",
    "dill.load",
    "cloudpickle.load",
    "marshal.loads",
    "shelve.open",
}


class Program:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: Path(path).write_bytes(pickle.dumps(value, 2))])
def test_a_share_with_a_program_is_refused(tmp_path, write):
    save_share({"numbers": [1]}, tmp_path, 0, 1, "replay")
    (share,) = tmp_path.iterdir()
    ran = tmp_path / "ran"
    write({"numbers": Program(ran)}, share)
    with pytest.raises(ConfigError, match="in .* cannot be read"):
        load_shares(tmp_path, "replay")
    assert not ran.exists()
    torch.load(share, weights_only=False) if write is torch.save else pickle.loads(share.read_bytes())
    assert ran.exists(), "the program would not have run anyway"


def test_every_load_in_the_sources_takes_values_only():
    loads, bad = 0, []
    for path in sorted(SOURCES.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name, given = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
            where = f"{path.relative_to(SOURCES)}:{call.lineno}: {name}"
            loads += name == "torch.load"
            if name in READ_CODE or (name == "torch.load" and given.get("weights_only") != "True"):
                bad.append(where)
            if given.get("allow_pickle") == "True" or name == "eval":
                bad.append(where)
    assert not bad
    assert loads >= 2
