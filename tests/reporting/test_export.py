import os
from errno import ENOSPC
from types import SimpleNamespace

import pandas as pd
import pytest
from made_run import completion, make_run

from vgr_trl.cli import evaluate
from vgr_trl.cli.__main__ import main
from vgr_trl.errors import DataError, DiskFullError
from vgr_trl.reporting.notebook import export_run, to_pandas
from vgr_trl.reporting.records import read_run


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_command_writes_a_row_per_token_with_own_signals_and_credit(tmp_path, ending):
    run = make_run(tmp_path / "run", steps=2)
    file = tmp_path / f"tokens.{ending}"
    assert main(["export", str(run), "--output", str(file)]) == main(["export", str(run)]) == 0
    assert (run / "tokens.parquet").is_file(), "without --output"
    read = pd.read_csv(file) if ending == "csv" else pd.read_parquet(file)
    pd.testing.assert_frame_equal(read, to_pandas(run), check_dtype=False)
    assert len(read) == 88
    one = read[(read["step"] == 2) & (read["mode"] == "train") & (read["completion"] == 1)]
    (record,) = (record for record in read_run(run).records("train") if record.step == 2)
    completion = record.completions[1]
    assert "".join(one["token"]) == "".join(completion.tokens)
    assert one["position"].tolist() == one["signal/place"].tolist() == list(range(11))
    assert one["credit/odd"].tolist() == [0, 1] * 5 + [0]
    assert one["vgr"].tolist() == completion.vgr
    assert (set(one["reward/vgr_reward"]), set(one["reward"])) == ({0.25}, {completion.reward})


def test_a_table_for_spreadsheets_has_no_formula_and_nothing_that_moves_a_terminal(tmp_path):
    odd = completion(tmp_path / "run" / "rollouts", 0, True, tokens=["=1+1", "\x1b[2J", "\u202eabc", "-", "a=b"])
    run = make_run(tmp_path / "run", steps=1, extra=[odd])
    for ending, tokens in (("csv", ["'=1+1", r"\x1b[2J", r"\u202eabc", "'-", "a=b"]), ("parquet", odd.tokens)):
        file = tmp_path / "new" / f"tokens.{ending}"
        assert export_run(run, file) == len(to_pandas(run))
        read = pd.read_csv(file) if ending == "csv" else pd.read_parquet(file)
        assert read["token"].tolist()[-5:] == tokens


def test_an_export_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    run, file = make_run(tmp_path / "run", steps=1), tmp_path / "tokens.csv"
    file.write_text("step,mode,completion,token\n")
    monkeypatch.setattr("vgr_trl.atomic_files.publish", fail_with_full_disk)
    with pytest.raises(DiskFullError):
        export_run(run, file)
    (run / "rollouts" / "records-000001.jsonl").write_text("damaged")
    with pytest.raises(DataError):
        export_run(run, file)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["tokens.csv"]
    assert file.read_text() == "step,mode,completion,token\n"


def fail_with_full_disk(*paths):
    raise OSError(ENOSPC, "No space left on device")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Run a command that writes a file; the last two write a list of skipped rows, and scores."""
    run, rows = make_run(tmp_path / "run", steps=1), tmp_path / "rows.jsonl"
    rows.write_text('{"question": "which colour", "answer": "red"}\n' * 5 + "{}\n")
    scores = SimpleNamespace(to_dict=lambda records: {"accuracy": 1.0, "mean_at_k": None})
    monkeypatch.setattr(evaluate, "evaluate_models", lambda data, options: {"model": scores})
    monkeypatch.setattr(evaluate, "print_scores", lambda results: None)
    commands = {
        "page.html": f"report {run} --output",
        "tokens.csv": f"export {run} --output",
        "tokens.parquet": f"export {run} --output",
        "inspect.html": f"data inspect {rows} --page",
        "skipped.jsonl": f"data inspect {rows} --skipped",
        "scores.json": "evaluate --model_name_or_path model --output_file",
    }
    return lambda name, path: main([*commands[name].split(), str(path)])


OUTPUTS = "page.html", "tokens.csv", "tokens.parquet", "inspect.html", "skipped.jsonl", "scores.json"


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_replaces_its_own_kind_and_nothing_else(write, tmp_path, name):
    path, data = tmp_path / name, tmp_path / f"data-{name}"
    assert [write(name, path), write(name, path)] == [0, 0]
    data.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    (link := tmp_path / f"link-{name}").symlink_to(path)
    os.mkfifo(pipe := tmp_path / f"pipe-{name}")
    for other in (data, link, pipe):
        before = other.lstat()
        assert write(name, other) == 1
        assert other.lstat() == before
