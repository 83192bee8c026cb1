"""A run whose groups are spread over processes continues with another number of them as if it had not stopped."""

import pytest
from support.launching import results_of
from support.trainers import train_file
from test_stages import assert_same, run


def run_in(processes, *given):
    return run(*given) if processes == 1 else results_of(run, *given, processes=processes)[0]


@pytest.mark.minutes
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_processes_continues_the_run(before, after, model_folder, question_files, tmp_path):
    data = "replay and resample", model_folder, train_file(question_files)
    whole = run_in(before, *data, tmp_path / "whole", 4 // before)
    checkpoint = str(tmp_path / "whole" / "replay_and_resample" / "checkpoint-4")
    assert_same(whole, run_in(after, *data, tmp_path / "rest", 4 // after, checkpoint))
    for name in ("replay/replaced_fraction", "dynamic_sampling/generated_groups"):
        assert sum(entry[name] for entry in whole[1]["history"][4:]) > 0, "it depends on what the checkpoint brought"
