"""Records of a run as a table with a row per token, for pandas, CSV and Parquet."""

from pathlib import Path
from typing import Any

import pandas as pd

from vgr_trl.reporting.records import Completion, Run, read_run
from vgr_trl.utils import ConfigError

PER_TOKEN = ("weights", "dependency", "vgr", "advantages", "entropies", "logps", "changes")
PER_COMPLETION = ("question", "group", "correct", "reward", "advantage", "replaced")


def to_pandas(run: str | Path | Run) -> pd.DataFrame:
    """Return a table with a row per token of every recorded completion.

    Columns are step, mode and number of the completion in its record; what holds of all its tokens (`question`,
    `reward`, `advantage`, `reward/<name>`, …); position from 0, text and measurements of the token; and `signal/<name>`
    and `credit/<name>` of own signals and credit rules. What was not measured is missing.

    Args:
        run: as `read_run` returns it, or its `output_dir`.
    """
    run = run if isinstance(run, Run) else read_run(run)
    found = [
        pd.DataFrame({"step": record.step, "mode": record.mode, "completion": number, **_token_columns(completion)})
        for record in run.records()
        for number, completion in enumerate(record.completions)
        if completion.tokens
    ]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _token_columns(completion: Completion) -> dict[str, Any]:
    columns: dict[str, Any] = {name: getattr(completion, name) for name in PER_COMPLETION}
    columns |= {f"reward/{name}": value for name, value in completion.rewards.items()}
    columns |= {"position": range(len(completion.tokens)), "token": completion.tokens}
    named = {name: getattr(completion, name) for name in PER_TOKEN}
    named |= {f"signal/{name}": values for name, values in completion.signals.items()}
    named |= {f"credit/{name}": values for name, values in completion.credit.items()}
    return columns | {name: values for name, values in named.items() if values is not None}


def export_run(run: Path, output: Path) -> int:
    """Write `to_pandas` of a run as CSV or Parquet, by the ending of `output`; return the number of rows.

    Raises:
        ConfigError: `output` has another ending.
        DataError: the run has no records.
    """
    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--output is {output}: give a file that ends in .csv or .parquet.")
    table = to_pandas(run)
    if output.suffix == ".csv":
        table.to_csv(output, index=False)
    else:
        table.to_parquet(output, index=False)
    return len(table)
