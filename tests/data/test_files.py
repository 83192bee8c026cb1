import pytest

from vgr_trl.files import is_writable, write_whole


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):  # noqa: PT011
        write_whole(tmp_path / "a", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    write_whole(tmp_path / "b", b"content")
    assert (tmp_path / "b").read_bytes() == b"content"


def test_what_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert is_writable(tmp_path / "file")
    assert is_writable(tmp_path / "new" / "folder" / "file")
    assert not is_writable(tmp_path)
    assert not is_writable(tmp_path / "file" / "below")
