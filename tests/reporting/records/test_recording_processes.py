"""Two processes that hold half of each group record what one process records."""

from dataclasses import asdict

import pytest
import recording_worker
from support.launching import results_of
from support.trainers import train_file

from vgr_trl.reporting.records import read_run

NUMBERS = ("weights", "dependency", "vgr", "advantages", "entropies", "logps", "changes", "metrics", "rewards",
           "reward", "advantage")  # fmt: skip


def close(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            close(found[name], expected[name])
    elif expected is None:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_one_process_and_two_record_the_same(model_folder, question_files, tmp_path):
    question_file = train_file(question_files)
    results_of(recording_worker.run, model_folder, question_file, tmp_path / "two", 4, processes=2)
    recording_worker.run(model_folder, question_file, tmp_path / "one", rows_per_process=8)
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    text, other = ((tmp_path / name / "rollouts.md").read_text(encoding="utf-8") for name in ("one", "two"))
    assert one.steps() == two.steps() == [(0, "eval"), (0, "train"), (1, "train"), (2, "eval")]
    for first, second in zip(one.records(), two.records(), strict=True):
        # Of two prompts with four completions each: the first two of each, then the third and fourth of the first.
        assert [completion.group for completion in first.completions] == [0, 0, 0, 0, 1, 1]
        assert len({completion.question for completion in first.completions}) == 2
        for mine, theirs in zip(first.completions, second.completions, strict=True):
            mine_as_dict, theirs_as_dict = asdict(mine), asdict(theirs)
            for name in NUMBERS:
                close(theirs_as_dict.pop(name), mine_as_dict.pop(name))
            attention, other_attention = mine_as_dict.pop("attention"), theirs_as_dict.pop("attention")
            close(other_attention["scale"], attention["scale"])
            differences = [abs(a - b) for a, b in zip(attention["values"], other_attention["values"], strict=True)]
            assert max(differences) <= 1
            assert theirs_as_dict == mine_as_dict
            assert len(mine.images) == 1
            assert (two.folder / str(mine.images[0].file)).is_file()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in other.splitlines() if line.startswith("#")
    ]
    assert "8 completions" in other
