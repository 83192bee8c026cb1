"""The report of a set as a picture; needs matplotlib, which nothing else here does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vgr_trl.data.build.statistics import ANSWERS, Statistics, on_one_line, tables, together
from vgr_trl.errors import ConfigError
from vgr_trl.files import is_writable, publish, unfinished

FORMATS = (".png", ".svg", ".pdf")
LONGEST_NAME = 24
FEWEST_BARS = 2  # that a panel has room for, so that one alone is no block
BAR, AROUND = 0.2, 0.75  # inches: of a bar with its number, and of what is above and below the bars of a panel
INK, MUTED, RULE, RAISED = "#1a1d21", "#5a636e", "#dde1e6", "#f6f7f9"  # as report_page/src/style.css
COLOURS = ("#0072b2", "#d55e00", "#007d5c", "#a8477f", "#5c5c5c", "#8a6d00")  # as of runs in report_page/src/colours.ts


def figures_for(path: Path) -> ModuleType:
    """Return matplotlib's figures, which can be written to `path`: to be called before any work is done, too.

    Raises:
        ConfigError: matplotlib is not installed, the suffix of `path` is none of `FORMATS`, or it cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"The plot is {path}: give a file that ends in {', '.join(FORMATS)}.")
    if not is_writable(path):
        raise ConfigError(f"The plot is {path}, which cannot be written: give a file in a folder that can.")
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("A plot needs matplotlib, which is not installed: pip install vgr_trl[plots].") from error
    return matplotlib.figure


def plot(statistics: Mapping[str, Statistics], path: Path) -> None:
    """Draw the counts of one or more splits, a panel for each table and a colour for each split.

    Args:
        statistics: by name of the split.
        path: of the picture; its suffix says the format, one of `FORMATS`.

    Raises:
        ConfigError: as `figures_for`.
    """
    figures = figures_for(path)
    whole = {title: list(counts) for title, counts in tables(together(statistics.values())).items() if counts}
    shown = {split: tables(counts, whole.get(ANSWERS)) for split, counts in statistics.items()}
    columns = _columns({title: AROUND + BAR * _room(names) * (len(shown) + 0.6) for title, names in whole.items()})
    longest = max(sum(column.values()) for column in columns)
    figure = figures.Figure(figsize=(12, longest), layout="constrained")
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False).ravel(), columns, strict=True):
        below = longest - sum(column.values())
        heights = [*column.values(), max(below, 1e-3)]
        *panels, rest = part.subplots(len(heights), 1, height_ratios=heights)
        rest.set_axis_off()
        for panel, title in zip(panels, column, strict=True):
            names = whole[title]
            _draw(
                panel, title, names, {split: [of[title].get(name, 0) for name in names] for split, of in shown.items()}
            )
            if len(shown) > 1 and title == next(iter(whole)):
                panel.legend(frameon=False, labelcolor=INK, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(unfinished(path), format=path.suffix[1:].lower())
        publish(path)
    finally:
        unfinished(path).unlink(missing_ok=True)


def _columns(heights: Mapping[str, float]) -> list[dict[str, float]]:
    """The panels in two columns, each below the column that is shorter so far."""
    columns: list[dict[str, float]] = [{}, {}]
    for title, height in heights.items():
        min(columns, key=lambda column: sum(column.values()))[title] = height
    return [column for column in columns if column]


def _room(names: Sequence[str]) -> int:
    return max(len(names), FEWEST_BARS)


def _draw(panel: Any, title: str, names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> None:
    height = 0.8 / len(counts)
    for number, (split, found) in enumerate(counts.items()):
        places = [index + (number - (len(counts) - 1) / 2) * height for index in range(len(names))]
        bars = panel.barh(places, found, height, label=split, color=COLOURS[number % len(COLOURS)])
        panel.bar_label(bars, [f"{count:,}" for count in found], padding=3, color=MUTED, fontsize="small")
    panel.set_yticks(range(len(names)), [_label(name) for name in names])
    panel.set_ylim(_room(names) - 0.5, -0.5)
    panel.margins(x=0.12)
    panel.set_title(title, loc="left", fontweight="bold", color=INK)
    panel.set_facecolor(RAISED)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, colors=MUTED)
    panel.grid(axis="x", color=RULE)
    panel.set_axisbelow(True)


def _label(name: str) -> str:
    text = on_one_line(name)
    text = text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
    return text.replace("$", r"\$")
