"""What the demo shows and writes at its end: before against after."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from vgr_trl.evaluation import Evaluation


@dataclass(frozen=True)
class Comparison:
    """What was measured before and after reinforcement, with the images and with blank ones."""

    before: Evaluation
    after: Evaluation
    blank_before: Evaluation
    blank_after: Evaluation

    @property
    def rose(self) -> bool:
        """Whether sampled accuracy on held-out questions rose."""
        return (self.after.mean_at_k or 0.0) > (self.before.mean_at_k or 0.0)


def write_metrics(comparison: Comparison, options: dict[str, Any], seconds: dict[str, float], output_dir: Path) -> None:
    """Write `metrics.json`: options, seconds and every number of the comparison."""
    metrics = {
        "options": options,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "rose": comparison.rose,
        **{name: getattr(comparison, name).to_dict() for name in ("before", "after", "blank_before", "blank_after")},
    }
    (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def comparison_table(comparison: Comparison) -> Table:
    """Return accuracy, accuracy with blank images and format, before and after."""
    before, after = comparison.before, comparison.after
    blank_before, blank_after = comparison.blank_before, comparison.blank_after
    table = Table(title=f"{before.questions} held-out questions, {before.k} samples each")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for name, old, new in (
        ("accuracy, greedy", before.accuracy, after.accuracy),
        ("accuracy, sampled", before.mean_at_k, after.mean_at_k),
        ("accuracy, image blanked, sampled", blank_before.mean_at_k, blank_after.mean_at_k),
        ("format, sampled", before.format_sampled, after.format_sampled),
        *(
            (f"  {family}, sampled", scores.mean_at_k, after.groups[family].mean_at_k)
            for family, scores in before.groups.items()
        ),
    ):
        table.add_row(name, f"{old:.3f}", f"{new:.3f}")
    return table
