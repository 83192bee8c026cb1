"""`vgr-trl report RUN [RUN ...]`: one page of HTML with the curves and completions of one or several runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vgr_trl.reporting.page import MEGABYTE, write_report
from vgr_trl.utils import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, say where it is and what it leaves out; return the exit status."""
    parser = argparse.ArgumentParser(prog="vgr-trl report", description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir of a run")
    parser.add_argument("--output", type=Path, default=None, help="the page (default: report.html in the first RUN)")
    parser.add_argument("--names", nargs="+", default=None, help="names of the runs, in order (default: their own)")
    parser.add_argument(
        "--max_megabytes", type=float, default=9.5, help="bound of the page's size, 1 to 100 (default 9.5)"
    )
    flags = parser.parse_args(argv)
    output = flags.output if flags.output is not None else flags.runs[0] / "report.html"
    report = write_report(flags.runs, output, max_megabytes=flags.max_megabytes, names=flags.names)
    console = Console(soft_wrap=True)
    size = f"{report.size / MEGABYTE:.1f} MB"
    console.print(f"{escape(str(report.path))}: {size}, {report.records} recorded steps.", highlight=False)
    for name, notes in report.notes.items():
        for note in notes:
            console.print(f"  {escape(printable(name))}: {escape(note)}", highlight=False)
    return 0
