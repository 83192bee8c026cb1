"""Records in a notebook: a completion with coloured tokens and images, and a table with a row per token."""

import base64
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment

from vgr_trl.atomic_files import write_atomic
from vgr_trl.errors import ConfigError, DataError, printable
from vgr_trl.options import check_value
from vgr_trl.reporting.console import QUANTITIES, VERDICTS, color_tokens, format_number, format_rewards, position_colour
from vgr_trl.reporting.records import Completion, Run, read_run, read_thumbnail, records_folder, refuse_unwritable

IMAGE_SIDE = 224  # longer side of an image, in pixels
MAX_OPACITY = 0.8  # opacity of the shade over a cell without attention
_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters |= {"number": format_number, "text": lambda text: printable(text).replace("\n", "↵\n")}
_TEMPLATE = _ENVIRONMENT.from_string(Path(__file__).with_name("completion.html").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class CompletionView:
    """HTML that a notebook displays for the object; self-contained, without scripts."""

    html: str = field(repr=False)  # keep it out of repr, which a saved notebook stores too

    def _repr_html_(self) -> str:
        return self.html


def show_completion(
    completion: Completion, run_folder: str | Path, color_by: str = "vgr", token: int | None = None
) -> CompletionView:
    """Return a view of a recorded completion: coloured tokens, and each image beside the attention over it.

    Tooltips show the value of a token and the attention share of an image cell. Cells are darker the less attention
    they get, relative to the cell with the most.

    Args:
        completion: completion of a record that `vgr_trl.reporting.records.read_run` reads.
        run_folder: `output_dir` of the run, for the thumbnails.
        color_by: `vgr`, `weights`, `dependency`, `advantages`, `entropies` or `logps`.
        token: index of the token whose attention to show, negative from the end; None: mean over all tokens.

    Raises:
        ConfigError: `color_by` or `token` is out of range.
    """
    if color_by not in QUANTITIES:
        raise ConfigError(f"color_by is {color_by!r}: give {', '.join(QUANTITIES)}.")
    count = len(completion.tokens)
    check_value("token", token, int | None, ge=-count, lt=count)
    defined = [value for value in completion.per_token()[color_by] or () if value is not None]
    html = _TEMPLATE.render(
        completion=completion,
        rewards=format_rewards(completion),
        verdict=VERDICTS[completion.correct],
        quantity=QUANTITIES[color_by],
        tokens=color_tokens(completion, color_by),
        range=[min(defined), max(defined)] if defined else None,
        colours=",".join(map(position_colour, (-1.0, 0.0, 1.0))),
        images=_build_images(completion, records_folder(Path(run_folder)), token),
        of="all tokens" if token is None else f"token {token % count}",
        darkest=MAX_OPACITY,
    )
    return CompletionView(html)


def _build_images(completion: Completion, folder: Path, token: int | None) -> list[dict[str, Any]]:
    """Describe each image: thumbnail, size, grid, and each cell's share of total and of maximum attention."""
    cells = [image.grid[0] * image.grid[1] if image.grid else 0 for image in completion.images]
    attention: list[float] = []  # per cell of all images, of one token or averaged over tokens
    if completion.attention is not None and all(cells) and completion.tokens:
        chosen = completion.written() if token is None else [token % len(completion.tokens)]
        attention = np.mean([completion.attention.row(index) for index in chosen], axis=0).tolist()
    images, rest = [], iter(attention if any(attention) else ())
    for image, count in zip(completion.images, cells, strict=True):
        longer = max(image.width, image.height, 1)
        size = [max(1, round(side * IMAGE_SIDE / longer)) for side in (image.width, image.height)]
        content = None if image.file is None else read_thumbnail(folder, image.file)
        data = content and "data:image/webp;base64," + base64.b64encode(content).decode()
        shares = [(value / sum(attention), value / max(attention)) for value in islice(rest, count)]
        images.append({"data": data, "size": size, "grid": image.grid, "shares": shares})
    return images


PER_COMPLETION = ("question", "group", "correct", "reward", "advantage", "replaced")


def to_pandas(run: str | Path | Run) -> pd.DataFrame:
    """Return a table with a row per token of every recorded completion.

    Columns are step, mode and number of the completion in its record; what holds of all its tokens (`question`,
    `reward`, `advantage`, `reward/<name>`, …); position from 0, text and measurements of the token; and `signal/<name>`
    and `credit/<name>` of own signals and credit rules. What was not measured is missing.

    Args:
        run: return value of `read_run`, or an `output_dir`.
    """
    run = run if isinstance(run, Run) else read_run(run)
    tables = [
        pd.DataFrame({"step": record.step, "mode": record.mode, "completion": number, **_token_columns(completion)})
        for record in run.records()
        for number, completion in enumerate(record.completions)
        if completion.tokens
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _token_columns(completion: Completion) -> dict[str, Any]:
    columns = {name: vars(completion)[name] for name in PER_COMPLETION}
    columns |= {f"reward/{name}": value for name, value in completion.rewards.items()}
    columns |= {"position": range(len(completion.tokens)), "token": completion.tokens}
    return columns | {name: values for name, values in completion.per_token().items() if values is not None}


def export_run(run: Path, output: Path) -> int:
    """Write the `to_pandas` table as CSV or Parquet, by the ending of `output`; return the number of rows.

    CSV is for terminals and spreadsheets: text is `printable`, and an apostrophe is put before what would be a formula.

    Raises:
        ConfigError: `output` has another ending, or is a file that was not exported.
        DataError: the run has no records, or none that can be read.
        DiskFullError: naming the file.
    """
    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--output is {output}: give a file that ends in .csv or .parquet.")
    mark = b"step,mode,completion," if output.suffix == ".csv" else b'"field_name": "mode"'
    refuse_unwritable(output, "--output", mark=mark)
    table = to_pandas(run)
    if table.empty:
        raise DataError(f"{run} has no recorded completion that can be read: give the output_dir of another run.")
    if output.suffix == ".csv":
        content = table.map(_escape_cell).rename(columns=printable).to_csv(index=False).encode()
    else:
        content = table.to_parquet(index=False)
    write_atomic(output, content)
    return len(table)


def _escape_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text
