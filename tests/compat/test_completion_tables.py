"""Tables of completions: what TRL writes for an evaluation stands beside that of training."""

import pytest

from vgr_trl.patches import beside_training, remove_oldest_tables


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "completions").mkdir()
    return tmp_path / "completions"


@pytest.mark.parametrize("trained", [True, False])
def test_a_table_of_an_evaluation_replaces_none_of_training(folder, trained):
    file, evaluated = folder / "completions_00002.parquet", folder / "completions_00002_eval.parquet"
    if trained:
        file.write_text("training")
    with beside_training(str(folder.parent), 2, True):
        file.write_text("evaluation")
    assert evaluated.read_text() == "evaluation"
    assert {path.name for path in folder.iterdir()} == ({file.name, evaluated.name} if trained else {evaluated.name})
    assert not trained or file.read_text() == "training"


def test_a_table_of_training_is_written_as_ever(folder):
    file = folder / "completions_00002.parquet"
    with beside_training(str(folder.parent), 2, False):
        file.write_text("training")
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_without_a_table_nothing_is_written(folder):
    with beside_training(str(folder.parent), 2, True):
        pass
    assert list(folder.iterdir()) == []


def test_beyond_the_bound_the_oldest_tables_but_the_first_go(folder):
    names = [f"completions_{step:05d}{kind}.parquet" for step in (0, 9, 10, 99_999, 100_000) for kind in ("", "_eval")]
    for name in names:
        (folder / name).write_bytes(b"x" * 100)
    (folder / "mine.parquet").write_bytes(b"x" * 10_000)
    remove_oldest_tables(str(folder.parent), 1000)
    assert len(list(folder.iterdir())) == 11
    remove_oldest_tables(str(folder.parent), 450)
    assert {path.name for path in folder.iterdir()} == {names[0], *names[-3:], "mine.parquet"}
    remove_oldest_tables(str(folder.parent), 1)
    assert {path.name for path in folder.iterdir()} == {names[0], names[-1], "mine.parquet"}
