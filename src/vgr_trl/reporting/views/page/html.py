"""A run as one page of HTML that opens from disk: the built page with the data put in."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from vgr_trl.errors import ConfigError, DataError
from vgr_trl.files import write_whole
from vgr_trl.reporting.views.page.page_data import PageData

PAGE = "page.html"  # built from report_page/ by `make report-page`
PLACE = "VGR_TRL_DATA_GOES_HERE"
MEGABYTE = 10**6
SMALLEST, LARGEST = 1.0, 100.0  # megabytes


@dataclass(frozen=True)
class Report:
    """What was written: file, bytes, number of recorded steps in it, and per run what the reader has to know."""

    path: Path
    size: int
    records: int
    notes: dict[str, list[str]]


def write_report(
    runs: Sequence[str | Path], path: str | Path, *, max_megabytes: float = 9.5, names: Sequence[str] | None = None
) -> Report:
    """Write a page with the curves and completions of one or several runs; what does not fit is thinned.

    The data go in as compressed bytes in base64, whose letters mean nothing to HTML, so text of a model cannot become
    part of the page.

    Args:
        runs: their `output_dir`.
        path: of the page; replaced, at once or not at all, if it exists.
        max_megabytes: bound of its size, 10⁶ bytes each, in [1, 100].
        names: of the runs, in order; by default as they call themselves.

    Raises:
        ConfigError: no run is given, the bound is out of range, or the file cannot be written.
        DataError: a run cannot be read.
    """
    if not runs:
        raise ConfigError("No run is given: give the output_dir of at least one.")
    if not SMALLEST <= max_megabytes <= LARGEST:
        raise ConfigError(f"max_megabytes is {max_megabytes}: give a number in [{SMALLEST:g}, {LARGEST:g}].")
    output = Path(path)
    if output.is_dir():
        raise ConfigError(f"The page cannot be written to {output}, which is a folder: give another --output.")
    page = page_template()
    room = int((max_megabytes * MEGABYTE - len(page.encode())) * 3 / 4) - 1024  # base64: 4 letters for 3 bytes
    try:
        data = PageData([Path(run) for run in runs], room, names)
    except OSError as error:  # rights, or a run that goes on and has just removed its oldest records
        raise DataError(f"A run cannot be read ({error}): check its folder and its rights, and try again.") from error
    packed = data.packed()
    html = page.replace(PLACE, base64.b64encode(packed).decode("ascii"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, html.encode())
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"The page cannot be written to {output} ({reason}): give another --output.") from error
    notes = {run.name: run.as_json()["notes"] for run in data.runs}
    return Report(output, len(html.encode()), sum(len(run.records) for run in data.runs), notes)


def page_template() -> str:
    """Return the built page, without data."""
    return files("vgr_trl.reporting.views.page").joinpath(PAGE).read_text(encoding="utf-8")
