"""Scores of one or several models as one table."""

from collections.abc import Mapping

from rich.table import Table

from vgr_trl.evaluation import Evaluation, Scores


def scores_table(results: Mapping[str, Evaluation]) -> Table:
    """Return a row for all questions of each model, and one for each group of them; models stand side by side."""
    first = next(iter(results.values()))
    rewards = list(dict.fromkeys(name for result in results.values() for name in result.rewards))
    table = Table()
    for heading in ("", *(["model"] if len(results) > 1 else [])):
        table.add_column(heading, overflow="fold")
    numbers = ["questions", "accuracy", "95 %", "majority", "blind", "unparsable", f"mean@{first.k}", f"pass@{first.k}"]
    for heading in (*numbers, "format", *rewards):
        table.add_column(heading, justify="right", overflow="fold")
    for group in (None, *dict.fromkeys(name for result in results.values() for name in result.groups)):
        for model, result in results.items():
            scores = result if group is None else result.groups.get(group)
            if scores is not None:
                names = [group or "all", *([model] if len(results) > 1 else [])]
                table.add_row(*names, *_cells(scores, rewards), end_section=model == list(results)[-1])
    return table


def _cells(scores: Scores, rewards: list[str]) -> list[str]:
    low, high = scores.interval
    rates = (scores.majority, scores.blind, scores.unparsable, scores.mean_at_k, scores.pass_at_k, scores.format)
    shown = [_rate(rate) for rate in (*rates, *(scores.rewards.get(name) for name in rewards))]
    return [str(scores.questions), _rate(scores.accuracy), f"{low:.3f}–{high:.3f}", *shown]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
