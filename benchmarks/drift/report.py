"""Tables of the runs."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_seeds import describe_machine
from methods.leaderboard import interval

FILE = Path(os.environ.get("RESULTS", Path(__file__).parents[1] / "results")) / "vgr_drift.jsonl"
LAST = 20  # steps, each with new questions
WITHIN = ("spread", "best", "other image", "halves", "words", "right", "right, words apart", "alike", "reward of VGR")
LOOKED_INSIDE = ("start", "plain", "VGR")
READING = (
    "Rewards are accuracy 2.5, format 0.5, length 1 and, but for `plain`, one of attention with weight 0.2 (or 1.0). "
    "`drawn`: the VGR reward of the group's values in random order. `scaled`: `attention_reward_scale` accuracy. `not "
    "divided`: `scale_rewards` none. `each divided`: `multi_objective_aggregation` normalize_then_sum. `floor 0.2`: "
    "the quartile distance is at least a fifth of the median.",
    f"`accuracy`: 4 sampled answers to 320 held-out questions. `while trained`: of the last {LAST} steps, whose "
    "questions are new, so that it does not hang on where the last step fell. `blanked`: with blank images. Late VGR "
    "and its change from the start: `said` by other completions, `weights` by weights that look otherwise at the same "
    "ones (means over both orders). `bias`: how far the frequencies of the words in thoughts are from the truth (total "
    "variation). Means over seeds; in brackets the difference to plain DAPO of the same start, from three seeds on "
    "with the 95 % interval of a bootstrap over seeds.",
)
FOUND = (
    "It is not noise: ranks drawn at random cost nothing (`drawn`), and a group is ranked nearly alike behind another"
    " image (`other image`). The reward ranks words. It is paid for saying those that get less attention, whatever is"
    " shown (`said`, `bias`), and so costs accuracy; how the weights look at the same words drifts too, at the weight"
    " 0.2 further and the other way, so late VGR rises (`weights`). The division by the group's deviation gives it "
    "its size: where all completions are right or all wrong, the advantages are those of VGR alone (`alike`, `reward "
    "of VGR`). Scaled by the spread of accuracy it hardly costs accuracy, at the weight 1.0 a little while it trains;"
    " nor does it lower VGR, for it still acts on words alone. Undivided, or each reward divided by itself, does as "
    "well at the weight 0.2 and not at 1.0; a floor does not (one seed each).",
    "The MDI reward is alike: accuracy ends below plain DAPO's on all five seeds, by 0.031 to 0.063 on four and by "
    "0.299 on the fifth, where other words raise late VGR from 0.609 to 1.090 (`said`), near the 1 that is paid for "
    "most; on all five the words are further from the truth (`bias`). Scaled it ends below within the spread of the "
    "seeds, and is a little below while it trains.",
    "Also tried, with one seed: no reward where accuracy does not differ, the whole of it elsewhere (accuracy 0.659, "
    "while trained 0.792, plain 0.755 and 0.787).",
)
INSIDE = (
    "160 held-out questions, 8 sampled completions each. `spread`: quartile distance over median. `best`: how much "
    "lower the lowest VGR of a group is than its mean. Correlations within groups of ln VGR: with that of the same "
    "completions behind the image of another question (`other image`), between even and odd tokens (`halves`), with "
    "being right (`right`). `words`: share of the variance that which words, and how many, a completion has explain in "
    "other groups; `right, words apart`: the correlation of the rest. `alike`: share of groups that are all right or "
    "all wrong; `reward of VGR`: share of all |advantage| in them with the VGR reward at 0.2 beside accuracy 2.5."
)


def read(settings: dict[str, int]) -> list[dict[str, Any]]:
    """Return the runs of these settings."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    return [line for line in lines if line.pop("settings") == settings]


def write(settings: dict[str, int]) -> None:
    """Write the tables."""
    runs = [run | {"while trained": while_trained(run)} for run in read(settings)]
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        "# Where the VGR reward drifts",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python -m drift --seeds {' '.join(map(str, seeds))} --steps "
        f"{settings['steps']} --prompts {settings['prompts']}`",
        "",
        ", ".join(f"{name} {value}" for name, value in describe_machine(1).items()) + ".",
        "",
        *(text for reading in (*FOUND, *READING) for text in (reading, "")),
        *outcomes(runs),
        "",
        "## Within groups",
        "",
        INSIDE,
        "",
        *insides(runs),
    ]
    FILE.with_suffix(".md").write_text("\n".join(lines) + "\n")


def while_trained(run: dict[str, Any]) -> float:
    """Return the accuracy of the last steps; of the start, where there are none, that of the held-out questions."""
    course = run.get("course", {}).get("rewards/accuracy_reward/mean", [run["accuracy"]])
    return statistics.mean(course[-LAST:])


def outcomes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for every variant."""
    compared, told = ("accuracy", "while trained", "late VGR"), ("blanked", "said", "weights", "bias")
    lines = ["| " + " | ".join(["variant", "seeds", *compared, *told]) + " |"]
    lines.append("|---|" + "---:|" * (1 + len(compared) + len(told)))
    plain = {run["seed"]: run for run in runs if run["variant"] == "plain"}
    for variant, own in by_variant(runs).items():
        cells = [variant, str(len(own))]
        for name in compared:
            gains = [run[name] - plain[run["seed"]][name] for run in own if run["seed"] in plain]
            cell = f"{mean(own, name):.3f}"
            if gains and variant not in ("start", "plain"):
                cell += f" ({statistics.mean(gains):+.3f}{spread(gains)})"
            cells.append(cell)
        cells += [f"{mean(own, name):{'+' if name in ('said', 'weights') else ''}.3f}" for name in told]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def spread(gains: Sequence[float]) -> str:
    """Return the interval of a mean, if there are enough seeds for one."""
    if len(gains) < 3:
        return ""
    low, high = interval(gains)
    return f", {low:+.3f} to {high:+.3f}"


def insides(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return what makes VGR differ within groups, before and after."""
    lines = ["| model | seeds | " + " | ".join(WITHIN) + " |", "|---|" + "---:|" * (1 + len(WITHIN))]
    for variant, own in by_variant(runs).items():
        if variant in LOOKED_INSIDE:
            cells = [f"{statistics.mean(run['within'][name] for run in own):.3f}" for name in WITHIN]
            lines.append("| " + " | ".join([variant, str(len(own)), *cells]) + " |")
    return lines


def by_variant(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of every variant, in the order of their first."""
    return {name: [run for run in runs if run["variant"] == name] for name in dict.fromkeys(r["variant"] for r in runs)}


def mean(runs: Sequence[dict[str, Any]], name: str) -> float:
    """Return the mean of a measure."""
    return statistics.mean(run[name] for run in runs)
