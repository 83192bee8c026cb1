"""The plots of the leaderboard."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from methods.seeds import Course, interval, mean_course


def plot_course(courses: Mapping[str, Sequence[Course]], file: Path) -> None:
    """Draw the mean accuracy over seeds against generated tokens, one line per method."""

    def draw(axes: Any) -> None:
        for method, own in courses.items():
            _, tokens, accuracies = zip(*mean_course(own), strict=True)
            thousands = [count / 1000 for count in tokens]
            axes.plot(thousands, accuracies, marker="o", markersize=3, label=f"{method} ({len(own)})")
        axes.set_xlabel("generated tokens, thousands; in brackets: seeds")

    _save(draw, file)


def plot_doses(doses: Mapping[str, Mapping[int, Sequence[float]]], file: Path) -> None:
    """Draw the mean accuracy over seeds against words of style, with intervals, one line per method."""

    def draw(axes: Any) -> None:
        for place, (method, points) in enumerate(doses.items()):
            means = [statistics.mean(values) for values in points.values()]
            ends = [interval(values) for values in points.values()]
            reach = [[mean - low for mean, (low, _) in zip(means, ends, strict=True)]]
            reach += [[high - mean for mean, (_, high) in zip(means, ends, strict=True)]]
            shifted = [dose + 0.3 * place for dose in points]
            axes.errorbar(shifted, means, yerr=reach, marker="o", markersize=4, capsize=3, label=method)
        axes.set_xlabel("words of style in a thought")

    _save(draw, file, legend="upper right")  # the best place is found without looking at intervals


def _save(draw: Any, file: Path, legend: Literal["best", "upper right"] = "best") -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    draw(axes)
    axes.set_ylabel("accuracy of sampled answers")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc=legend)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
