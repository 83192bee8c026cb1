"""The page of the benchmark of steps."""

from statistics import median
from typing import Any

from step_cases import Case
from step_limit import signals_limit, step_limit, update_limit
from step_runs import Place

INTRODUCTION = """\
Ours divided by TRL's `GRPOTrainer` (signals: divided by the step without any): smaller is better; in brackets the
other → ours. Times are medians of turns; the other columns are read in a process of its own, memory above that of
libraries, model and trainer. An update is all training passes of one rollout and the optimizer; a step is generation
by transformers, whatever is measured, and the update. Operations are counted by PyTorch, attention over the keys that
kernels pass over: all, or for calls without padding those that are seen. The limit is worked out on paper
(`step_limit.py`): every token once for all rows that begin with it, keys that are seen, nothing for padding, dead rows,
frozen weights and tokens without credit.

On a CPU memory is one: images that TRL's loader decodes anew for each completion and each micro-batch count, which
would not be in a GPU's memory, and so do the pixels of every completion, which would."""
LIMIT_OF_SIGNALS = """\
The limit of a step with every signal, and of c, has one pass more than that without any: dependence on the image is
the difference of two log-probabilities of each token, and the second, given another image, is in no other pass. The
first ones and attention it takes from generation, as the line `generated` does; by default a scoring pass gives them.
All rows are generated up to T, which counts against ours and TRL's alike, and is no part of the limit."""
COLUMNS = ("rollout", "", "time", "goal", "peak memory", "goal", "operations", "limit", "ours / limit", "goal")


COUNTED = """\
Ours and the limit, in 10⁹: products with the matrices of layers, adapters and tower; attention; the head, whose logits
TRL computes again for their gradients. What is above the limit besides: completions of unequal length that pass
together, and the keys that they do not see."""


def page(found: dict[str, Any], place: Place) -> str:
    """Markdown of what there is."""
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    flags = [name for name in ("quick", "checkpointing") if found["place"][name]]
    lines = ["# Steps against TRL's", "", INTRODUCTION, "", f"{machine}. {_place(found['place'])}", ""]
    lines += [f"`{found['command']}`, commit {found.get('commit', 'not recorded')}", ""] if "command" in found else []
    lines += ["Sizes are those of `--quick`: they say nothing about times.", ""] if "quick" in flags else []
    measured = {name: (place.case(name), of_case) for name, of_case in found["cases"].items()}
    if "signals" in measured:
        lines += ["## Where a step with every signal goes", "", STAGES, "", *stages_table(measured["signals"][1]), ""]
        lines += ["## Against TRL", ""]
    lines += table(found, place)
    lines += ["", LIMIT_OF_SIGNALS, "", "## Rollouts", ""]
    lines += [f"- {_describe(case)}" for case, _ in measured.values()]
    lines += [
        "",
        "## Operations of an update",
        "",
        COUNTED,
        "",
    ]
    lines += ["| rollout | " + " | ".join(PARTS) + " |", "|---|" + "---:|" * len(PARTS)]
    for name, (case, of_case) in measured.items():
        *_, ours = case.variants
        counted = of_case.get("counts", {}).get(ours, {}).get("operations", {}).get("update")
        lines += [] if counted is None else [f"| {name} | " + " | ".join(_parts(case, counted)) + " |"]
    return "\n".join(lines) + "\n"


def table(found: dict[str, Any], place: Place) -> list[str]:
    """Lines of the table of all rollouts."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    for name, of_case in found["cases"].items():
        case = place.case(name)
        other, *ours = case.variants
        parts = ("update", "step") if other == "trl" else ("update",) if other == "whole" else ("step",)
        lines += [_row(name, case, of_case, part, other, variant) for variant in ours for part in parts]
    return lines


STAGES = """\
Stage by stage, of the rollout `signals` below: seconds and 10⁹ operations without any signal, with attention for the
metrics alone, and with every signal, read off a scoring pass or off generation (`attention_source generate`).
`generation`, `old_logps` and `perturbed` are passes without gradients: sampling, the scoring pass (log-probabilities,
attention, what else is read there) and the pass over perturbed images; `update` is all training passes and what stands
between the stages."""


def stages_table(of_case: dict[str, Any]) -> list[str]:
    """Return the lines of the table of the stages of a step, for each variant."""
    seconds, counts = of_case.get("seconds", {}), of_case.get("counts", {})
    variants = [*(seconds or counts)]
    ways = {
        f"{variant}, {unit}": kind
        for variant in variants
        for unit, kind in (
            ("s", {part: median(run.get(part, 0) for run in seconds[variant]) for part in seconds[variant][0]})
            if variant in seconds else ("s", {}),
            ("G", {part: amounts["together"] / 1e9 for part, amounts in counts[variant]["operations"].items()})
            if variant in counts else ("G", {}),
        )
    }  # fmt: skip
    stages = [*dict.fromkeys(part for kind in ways.values() for part in kind if part.startswith("stage "))]
    lines = ["| stage | " + " | ".join(ways) + " |", "|---|" + "---:|" * len(ways)]
    for stage in stages:
        cells = [_number(kind[stage]) if stage in kind else "" for kind in ways.values()]
        lines.append(f"| {stage.removeprefix('stage ')} | " + " | ".join(cells) + " |")
    return lines


PARTS = ("products", "attention", "head", "together")


def _parts(case: Case, counted: dict[str, int]) -> list[str]:
    limit = update_limit(case)
    limit["together"] = sum(limit.values())
    limit["products"] = sum(limit.pop(part, 0) for part in ("layers", "adapters", "tower"))
    return [f"{_number(counted.get(part, 0) / 1e9)} of {_number(limit[part] / 1e9)}" for part in PARTS]


def _place(place: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in place.items() if value not in (None, False)) + "."


def _describe(case: Case) -> str:
    size, lengths, shape = case.size, case.lengths, case.shape
    sizes = f"P {size.prompt}, {size.vision} of them vision tokens, T {size.completion}, G {size.generations}"
    return (
        f"{case.title}. {sizes}, {case.prompts} prompt(s); mean length {sum(lengths) / len(lengths):.0f}. "
        f"Hidden {shape.hidden}, {shape.layers} layers, {shape.vocabulary} words."
    )


def _row(name: str, case: Case, of_case: dict[str, Any], part: str, other: str, ours: str) -> str:
    pair = other, ours
    seconds, counts = (of_case.get(kind, {}) for kind in ("seconds", "counts"))
    goals = case.goals if ours in ("signals", [*case.variants][-1]) else {}
    limit = sum(update_limit(case).values()) if part == "update" else step_limit(case)
    if part == "step" and (ours in ("signals", "generated") or case.scored_share < 1):
        limit = signals_limit(case)
    operations = [counts[one]["operations"][part]["together"] for one in pair if one in counts]
    peaks = [counts[one]["bytes"][part] for one in pair if one in counts]
    cells = [
        name,
        part if other == "trl" else f"{part}, {ours}",
        _pair([median(run[part] for run in seconds[one]) for one in pair if one in seconds], 1, "s"),
        _goal(goals, f"{part} seconds"),
        _pair(peaks, 1e6, "MB"),
        _goal(goals, f"{part} bytes"),
        _pair(operations, 1e9, "G"),
        f"{_number(limit / 1e9)} G",
        f"{counts[ours]['operations'][part]['together'] / limit:.2f}" if ours in counts else "",
        _goal(goals, f"{part} operations"),
    ]
    return f"| {' | '.join(cells)} |"


def _pair(values: list[float], scale: float, unit: str) -> str:
    if len(values) < 2:
        return ""
    other, ours = (value / scale for value in values)
    return f"**{ours / other:.3f}** ({_number(other)} → {_number(ours)} {unit})"


def _number(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _goal(goals: dict[str, float], name: str) -> str:
    return f"≤ {goals[name]}" if name in goals else ""
