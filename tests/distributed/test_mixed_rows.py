"""Rows with an image on one process and without on the other: TRL gathers the images of its tables on one side only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mixed_worker.py")


@pytest.mark.slow
def test_rows_with_and_without_images_on_two_processes(model_folder, question_files, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(model_folder), question_files.split(",")[0].removeprefix("train="), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    tables = json.loads((tmp_path / "tables.json").read_text())
    # Rows 0 and 1 are dealt to the two processes, then rows 2 and 3; rows 1 and 2 have no image.
    assert tables[:2] == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
