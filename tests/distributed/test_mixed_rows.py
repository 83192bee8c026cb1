"""Rows with an image on one process and without on the other: TRL gathers the images of its tables on one side only."""

import json
from pathlib import Path

import pytest
from support.launching import launch
from support.trainers import train_file

SCRIPT = Path(__file__).with_name("mixed_worker.py")


@pytest.mark.slow
def test_rows_with_and_without_images_on_two_processes(model_folder, question_files, tmp_path):
    launch(SCRIPT, model_folder, train_file(question_files), tmp_path, processes=2)
    tables = json.loads((tmp_path / "tables.json").read_text())
    # Rows 0 and 1 are dealt to the two processes, then rows 2 and 3; rows 1 and 2 have no image.
    assert tables[:2] == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
