"""Draws `results/sharing_grid.json` as a heat map, `results/sharing_grid.png`; needs matplotlib.

python benchmarks/sharing_heat_map.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from sharing_models import Size

matplotlib.use("Agg")
from matplotlib import pyplot

GRID = Path(__file__).parent / "results" / "sharing_grid.json"


def operations(rows: dict[str, Any]) -> float:
    """Of forward and backward pass, shared over plain."""
    counts = rows["training"]["operations"]
    return counts["shared"] / counts["plain"]


def scoring_time(rows: dict[str, Any]) -> float:
    """Of a pass without gradients, shared over plain."""
    return _seconds(rows, "scoring", "shared") / _seconds(rows, "scoring", "plain")


def training_time(rows: dict[str, Any]) -> float:
    """Of forward and backward pass, shared over plain."""
    return _seconds(rows, "training", "shared") / _seconds(rows, "training", "plain")


def whole_time(rows: dict[str, Any]) -> float:
    """Of generation and training together, shared over plain."""
    shared, plain = (sum(_seconds(rows, place, kind) for place in ("generation", "training")) for kind in KINDS)
    return shared / plain


def _seconds(rows: dict[str, Any], place: str, kind: str) -> float:
    return median(rows[place]["seconds"][kind])


KINDS = ("shared", "plain")
PANELS: dict[str, Callable[[dict[str, Any]], float]] = {
    "operations, forward + backward": operations,
    "time, scoring": scoring_time,
    "time, forward + backward": training_time,
    "time, generation and training": whole_time,
}


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel per kind of ratio and G: prompt tokens upwards, completion tokens to the right."""
    cells: dict[Size, dict[str, Any]] = {}
    for row in results["rows"]:
        cells.setdefault(Size.parse(row["size"]), {})[row["place"]] = row
    prompts, completions, generations = (
        sorted({getattr(size, name) for size in cells}) for name in ("prompt", "completion", "generations")
    )
    figure, axes = pyplot.subplots(
        len(PANELS), len(generations), figsize=(3.2 * len(generations), 3 * len(PANELS)), layout="constrained"
    )
    picture: Any = None
    for line, (title, value) in zip(axes, PANELS.items(), strict=True):
        for axis, count in zip(line, generations, strict=True):
            values = {(size.prompt, size.completion): value(cells[size]) for size in cells if size.generations == count}
            rows = [[values[prompt, completion] for completion in completions] for prompt in prompts]
            picture = axis.imshow(rows, vmin=0, vmax=1, cmap="viridis", origin="lower")
            axis.set_xticks(range(len(completions)), completions)
            axis.set_yticks(range(len(prompts)), prompts)
            axis.set(xlabel="T, completion tokens", ylabel="P, prompt tokens")
            axis.set_title(f"{title}\nG = {count}", fontsize=9)
            for y, numbers in enumerate(rows):
                for x, number in enumerate(numbers):
                    colour = "white" if number < 0.6 else "black"
                    axis.text(x, y, f"{number:.2f}", ha="center", va="center", color=colour)
    figure.colorbar(picture, ax=axes, shrink=0.5, label="shared / plain")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(GRID.read_text()), GRID.with_suffix(".png"))
