from errno import ENOSPC

import pandas as pd
import pytest
from made_run import completion, make_run

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
    file.write_text("before")
    monkeypatch.setattr("vgr_trl.atomic_files.publish", fail_with_full_disk)
    with pytest.raises(DiskFullError):
        export_run(run, file)
    (run / "rollouts" / "records-000001.jsonl").write_text("damaged")
    with pytest.raises(DataError):
        export_run(run, file)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["tokens.csv"]
    assert file.read_text() == "before"


def fail_with_full_disk(path):
    raise OSError(ENOSPC, "No space left on device")
