"""Records as a table: a row per token, in memory and as files."""

import pandas as pd
import pytest
from made_run import make_run

from vgr_trl.cli.__main__ import main
from vgr_trl.reporting.notebook import to_pandas
from vgr_trl.reporting.records import read_run


def test_a_row_per_token_with_own_signals_and_credit(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    table = to_pandas(run)
    records = list(read_run(run).records())
    assert len(table) == sum(len(completion.tokens) for record in records for completion in record.completions) == 88
    one = table[(table["step"] == 2) & (table["mode"] == "train") & (table["completion"] == 1)]
    (record,) = (record for record in records if (record.step, record.mode) == (2, "train"))
    completion = record.completions[1]
    assert "".join(one["token"]) == "".join(completion.tokens)
    assert one["position"].tolist() == one["signal/place"].tolist() == list(range(11))
    assert one["credit/odd"].tolist() == [0, 1] * 5 + [0]
    assert one["vgr"].tolist() == completion.vgr
    assert set(one["reward/vgr_reward"]) == {0.25}
    assert set(one["reward"]) == {completion.reward}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_command_writes_a_file_that_pandas_reads(tmp_path, capsys, ending):
    run = make_run(tmp_path / "run", steps=2)
    file = tmp_path / f"tokens.{ending}"
    assert main(["export", str(run), "--output", str(file)]) == 0
    assert capsys.readouterr().out == f"Wrote 88 rows to {file}.\n"
    read = pd.read_csv(file) if ending == "csv" else pd.read_parquet(file)
    pd.testing.assert_frame_equal(read, to_pandas(run), check_dtype=False)
    assert main(["export", str(run), "--output", str(tmp_path / "tokens.txt")]) == 1
    assert "give a file that ends in .csv or .parquet" in capsys.readouterr().err
