import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launching import environment
from support.trainers import train_file

DRIVER = Path(__file__).with_name("chaos_driver.py")
# kind of engine, size of the replay buffer, most points of each process (0: all)
CASES = [("one", 0, 0), ("one", 4, 0), ("ddp", 4, 12), ("zero2", 4, 8), ("zero3", 4, 8), ("fsdp2", 4, 8)]


@pytest.mark.minutes
@pytest.mark.skipif(not find_spec("ckpt_chaos"), reason="ckpt-chaos (tests/faults/requirements.txt) is not installed")
@pytest.mark.parametrize(("kind", "replay", "most"), CASES)
def test_no_kill_in_a_save_costs_more_than_what_was_not_saved(
    kind, replay, most, model_folder, question_files, tmp_path
):
    given = [model_folder, train_file(question_files), tmp_path, kind, replay, most]
    command = [sys.executable, "-W", "ignore", str(DRIVER), *map(str, given)]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert len(verdicts) >= (most or 60)
    assert {point.split()[-1] for point, *_ in verdicts} == {"before", "torn"}
    failed = [[*found] for found in verdicts if found[1] not in ("PASS", "FINISHED")]
    assert failed == []
