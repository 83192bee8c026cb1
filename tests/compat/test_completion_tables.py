"""Tables of completions: what TRL writes for an evaluation stands beside that of training."""

import pytest

from vgr_trl.compat.completion_tables import beside_training


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
