import pytest

from vgr_trl.data.columns import Origin, Question
from vgr_trl.data.public_sets import keep_ids, read_ids
from vgr_trl.utils import ConfigError


@pytest.mark.parametrize(
    ("text", "ids"),
    [("a\n b \n\nc", {"a", "b", "c"}), ('["a", 7]', {"a", "7"}), ("\ufeffa\r\nb\r\n", {"a", "b"}), ("7", {"7"})],
)
def test_ids_per_line_or_as_json(tmp_path, text, ids):
    (tmp_path / "ids").write_bytes(text.encode())
    assert read_ids(tmp_path / "ids") == ids


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has no ids: give one per line"),
        (b"\n \n", "has no ids"),
        (b"[]", "has no ids"),
        (b'["a"', "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'[{"a": 1}]', "holds more than texts and whole numbers"),
        (b"[" * 100_000, "cannot be read"),
        (b"[true]", "holds more than texts and whole numbers"),
    ],
)
def test_files_without_ids(tmp_path, data, words):
    (tmp_path / "ids").write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_ids(tmp_path / "ids")


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="question_id_file is .*nothing, which cannot be read"):
        read_ids(tmp_path / "nothing")


def test_reasons_pass_and_missing_ids_are_known_at_the_end():
    rows = [(Origin("f", 0), "bad"), *((Origin("f", 1), Question(name, "s", "p", "x", ["i"])) for name in "abc")]
    missing = {"c", "a", "z"}
    kept = keep_ids(rows, {"c", "a", "z"}, missing)
    assert [found if isinstance(found, str) else found.id for _, found in kept] == ["bad", "a", "c"]
    assert missing == {"z"}
