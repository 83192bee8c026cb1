"""The report of a set as a picture; needs matplotlib, which nothing else here does."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from vgr_trl.data.build.statistics import ANSWERS, Statistics, on_one_line, tables, together
from vgr_trl.errors import ConfigError
from vgr_trl.files import is_writable, publish, unfinished

FORMATS = (".png", ".svg", ".pdf")
LONGEST_NAME = 48
FEWEST_BARS = 4  # that a panel has room for, so that one alone is no block
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
    lines = (len(whole) + 1) // 2
    figure = figures.Figure(figsize=(12, 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, 2, squeeze=False).ravel()
    for panel, (title, names) in zip(panels, whole.items(), strict=False):
        height = 0.8 / len(shown)
        for number, (split, found) in enumerate(shown.items()):
            places = [index + (number - (len(shown) - 1) / 2) * height for index in range(len(names))]
            counts = [found[title].get(name, 0) for name in names]
            bars = panel.barh(places, counts, height, label=split, color=COLOURS[number % len(COLOURS)])
            panel.bar_label(bars, [f"{count:,}" for count in counts], padding=3, color=MUTED, fontsize="small")
        panel.set_yticks(range(len(names)), [on_one_line(name)[:LONGEST_NAME].replace("$", r"\$") for name in names])
        panel.set_ylim(max(len(names), FEWEST_BARS) - 0.5, -0.5)
        panel.margins(x=0.12)
        panel.set_title(title, loc="left", fontweight="bold", color=INK)
        panel.set_facecolor(RAISED)
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0, colors=MUTED)
        panel.grid(axis="x", color=RULE)
        panel.set_axisbelow(True)
    for panel in panels[len(whole) :]:
        panel.set_axis_off()
    panels[0].legend(frameon=False, labelcolor=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(unfinished(path), format=path.suffix[1:].lower())
        publish(path)
    finally:
        unfinished(path).unlink(missing_ok=True)
