"""The table of docs/compatibility.md: one row per environment, of what was really run."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

BEGIN, END = "<!-- written by make compat -->\n", "<!-- end -->"


def counts(report: Path) -> tuple[int, int, int]:
    """Return how many tests passed, failed and were skipped, of pytest's report as JUnit writes it."""
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def row(name: str, versions: Mapping[str, str], compared: Sequence[str], outcome: Sequence[str]) -> str:
    """Return a row of the table: name, versions in the order of `compared`, outcome."""
    return "| " + " | ".join([name, *(versions[package] for package in compared), *outcome]) + " |"


def with_row(text: str, new: str, order: Sequence[str]) -> str:
    """Return the page with a row put into its table, in the place of that of the same environment if there is one.

    Args:
        text: of the page.
        new: row.
        order: of the names of environments; rows of others are dropped.
    """
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    head, line, *rows = table.strip().splitlines()
    named = {name_of(each): each for each in [*rows, new]}
    kept = [named[name] for name in order if name in named]
    return before + BEGIN + "\n".join([head, line, *kept, ""]) + END + after


def name_of(line: str) -> str:
    """Return the first cell of a row."""
    return line.split("|")[1].strip()
