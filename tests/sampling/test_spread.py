"""Groups that are spread over real processes: the same batches as with one process, row by row."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vgr_trl.sampling import Placement

WORKER = Path(__file__).with_name("spread_worker.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Histories by number of processes and process: without an interruption and with one after step 2."""
    folder = tmp_path_factory.mktemp("spread")
    done = subprocess.run([sys.executable, WORKER, folder], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    files = {(world, rank): folder / f"{world}-{rank}.pt" for world in (1, 2, 3, 4) for rank in range(world)}
    return {key: torch.load(file, weights_only=True) for key, file in files.items()}


@pytest.mark.parametrize("interrupted", [False, True], ids=["in one go", "resumed"])
@pytest.mark.parametrize("world", [2, 3, 4])  # rows per process: 6, a group and a half; 4, whole groups; 3
def test_several_processes_train_on_what_one_trains_on(runs, world, interrupted):
    alone = runs[1, 0][False]
    assert [step["replaced"] for step in alone] == [[], [1], [], [1], [2], [0, 1], [0, 2], [0, 1, 2]]
    assert any(not all(step["entered"]) for step in alone), "the buffer has been full"
    together = [runs[world, rank][interrupted] for rank in range(world)]
    for step, expected in enumerate(alone):
        parts = [history[step] for history in together]
        assert [row for part in parts for row in part["rows"]] == expected["rows"]
        for part in parts:
            for name in ("tokens", "replaced", "entered", "size", "age"):
                assert part[name] == expected[name], name
        megabytes = sum(part["megabytes"] for part in parts)
        assert megabytes == pytest.approx(expected["megabytes"], rel=0.1)  # a part without images has no token types
        assert len({part["calls"] for part in parts}) == 1, "every process communicates equally often"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_log_probabilities_of_a_group_of_another_round_reach_the_process_that_holds_it(runs, world):
    """Group 2 took place 0, group 0 place 1, group 1 place 2; row r of the batch has the log-probabilities -r."""
    expected = {place: [-float(row) for row in range(4 * place, 4 * place + 4)] for place in range(3)}
    for processes in (1, world):
        found = [runs[processes, rank][2] for rank in range(processes)]
        assert sum(map(len, found)) == 3, "each group is completed once"
        assert {place: first for part in found for place, first in part.items()} == expected


def test_one_process_never_communicates(runs):
    assert runs[1, 0][False][-1]["calls"] == 0


def test_whole_groups_travel_only_to_be_put_elsewhere(runs):
    """With three processes of one group each, only replacing needs a call, once in a step at most."""
    calls = [step["calls"] for step in runs[3, 0][False]]
    assert calls[0] == 0
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(calls))
    assert calls[-1] >= 1


def test_where_rows_lie():
    """Three processes of four rows, groups of six: 0-5 on processes 0 and 1, 6-11 on 1 and 2."""
    places = [Placement(4, 6, process, 3) for process in range(3)]
    assert [list(places[0].holders(group)) for group in range(2)] == [[0, 1], [1, 2]]
    assert places[1].here(0) == [(0, 4), (1, 5)]
    assert places[1].here(1) == [(2, 0), (3, 1)]
    assert places[2].here(0) == []
    assert places[0].num_groups == 2
