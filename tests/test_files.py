import errno
import os
from io import FileIO
from pathlib import Path

import pytest

from vgr_trl import atomic_files
from vgr_trl.atomic_files import append_atomic
from vgr_trl.errors import ConfigError, DiskFullError
from vgr_trl.reporting.records import refuse_unwritable


class SmallDisk(FileIO):
    """Takes four bytes at a time, and has room for six in all."""

    def write(self, data):
        room = min(4, 6 - os.fstat(self.fileno()).st_size)
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data)[:room])


def test_what_does_not_fit_is_not_appended_at_all(tmp_path, monkeypatch):
    path = tmp_path / "log.md"
    append_atomic(path, b"abc")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *mode, **options: SmallDisk(path, "ab"))
        with pytest.raises(DiskFullError):
            append_atomic(path, b"defghij")  # three of its seven bytes fit
    assert path.read_bytes() == b"abc"
    append_atomic(path, b"def")
    assert path.read_bytes() == b"abcdef"


def test_a_file_that_two_processes_write_at_a_time_is_whole(tmp_path, monkeypatch):
    """The second begins and ends while the first waits for its disk."""
    path, plain = tmp_path / "page.html", atomic_files.publish

    def publish(*paths):
        monkeypatch.setattr(atomic_files, "publish", plain)
        atomic_files.write_atomic(path, b"second")
        assert path.read_bytes() == b"second"
        plain(*paths)

    monkeypatch.setattr(atomic_files, "publish", publish)
    atomic_files.write_atomic(path, b"first")
    assert path.read_bytes() == b"first"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("head", [b"", b"0" * 2**16])
def test_an_output_replaces_its_own_kind(tmp_path, head):
    path = tmp_path / "output"
    for content in (b"", head + b"mark" + b"0" * 2**15):
        path.write_bytes(content)
        refuse_unwritable(path, "output", mark=b"mark")
    with pytest.raises(ConfigError):
        refuse_unwritable(path, "output", mark=b"another")
