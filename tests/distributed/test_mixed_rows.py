"""Rows with an image on one process and without on the other: TRL gathers the images of its tables on one side only."""

import mixed_worker
import pytest
from support.launching import results_of
from support.trainers import train_file


@pytest.mark.slow
def test_rows_with_and_without_images_on_two_processes(model_folder, question_files, tmp_path):
    data = model_folder, train_file(question_files)
    tables, _ = results_of(mixed_worker.tables_of, *data, tmp_path, processes=2)
    # Rows 0 and 1 are dealt to the two processes, then rows 2 and 3; rows 1 and 2 have no image.
    assert tables[:2] == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
