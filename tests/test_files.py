import errno
import os
from io import FileIO
from pathlib import Path

import pytest

from vgr_trl.atomic_files import append_atomic
from vgr_trl.errors import DiskFullError


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


def test_appending_makes_the_folder_and_a_head_in_an_empty_file(tmp_path):
    path = tmp_path / "deep" / "log.md"
    for line in (b"one\n", b"two\n"):
        append_atomic(path, line, head=b"# Log\n")
    assert path.read_bytes() == b"# Log\none\ntwo\n"
