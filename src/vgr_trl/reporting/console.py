"""Print records in colour, and one line per step of training; the number formats that all records share."""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from vgr_trl.errors import printable
from vgr_trl.reporting.records import Completion, Numbers, Record

LATE_REWARD = "reward_late_weights"  # the mean reward under `reward_weights`, while `early_reward_weights` hold too
_REWARD_MEAN = re.compile(r"rewards?/([^/]+)(?:/mean)?")
_STEP_QUANTITIES = (  # heading, logged name (EasyR1 reward files: reward/…), format
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "rewards/accuracy_reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.3f}"),
    ("format", "rewards/think_format_reward/mean", "{:.2f}"),
    ("tokens", "completions/mean_length", "{:.0f}"),
    ("VGR", "attention/late/vgr", "{:.3f}"),
    ("groups with non-zero variance", "sampling/nonzero_variance_fraction", "{:.0%}"),
    ("loss", "loss", "{:.4f}"),
)


def print_record(record: Record, console: Console | None = None, prompt_length: int | None = None) -> None:
    """Print prompts, completions and rewards; tokens are coloured by weight, else by VGR, as in notebooks.

    Args:
        console: None: standard output.
        prompt_length: characters of a prompt to print; None: all.
    """
    for item in record.completions:
        tokens = color_tokens(item, "vgr" if item.weights is None else "weights")
        body = Text.assemble(
            (f"{printable(preview(item.prompt.strip(), prompt_length))}\n", "dim"),
            *((text, f"black on {colour}" if colour else "") for text, _, colour in tokens),
            (f"\n{VERDICTS[item.correct]}", "bold cyan" if item.correct else "bold magenta"),
            f" {format_rewards(item)}, advantage {format_number(item.advantage)}",
        )
        panel = Panel(body, title=f"step {record.step}, prompt {item.group}", title_align="left")
        (console or Console()).print(panel)


def step_line(step: int, total: int, logs: Mapping[str, float], seconds_per_step: float | None) -> str:
    """Return one line: step, rewards, tokens per completion, VGR, groups with variance, seconds per step, time left.

    Args:
        total: steps of the run.
        logs: of this step; missing quantities are omitted.
        seconds_per_step: mean over recent steps; None: not known yet.
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    shown = {name for _, name, _ in _STEP_QUANTITIES}
    own = [(each[1].removesuffix("_reward"), each[0]) for each in map(_REWARD_MEAN.fullmatch, logs) if each]
    others = [(heading, name, "{:.3f}") for heading, name in own if name not in shown]
    for heading, name, form in (*_STEP_QUANTITIES[:4], *others, *_STEP_QUANTITIES[4:]):
        if (value := logs.get(name)) is not None:
            parts.append(f"{heading} {form.format(value)}")
    if seconds_per_step is not None:
        left = (total - step) * seconds_per_step
        parts += [f"{seconds_per_step:.1f} s/step"] + [f"{format_duration(left)} left"] * (step < total)
    return "  ".join(parts)


def evaluation_prefix(logs: Mapping[str, float]) -> str | None:
    """Return `eval_`, or `eval_NAME_` for one of several evaluation sets; None for logs of training."""
    return next((name.removesuffix("runtime") for name in logs if re.fullmatch("eval_(.+_)?runtime", name)), None)


def evaluation_line(step: int, logs: Mapping[str, float], prefix: str) -> str:
    """Return one line about an evaluation: set, step, reward, accuracy."""
    names = [(heading, f"{prefix}{name}") for heading, name, _ in _STEP_QUANTITIES[:3]]
    shown = [f"{heading} {logs[name]:.3f}" for heading, name in names if name in logs]
    return f"evaluation{prefix[4:-1].replace('_', ' ', 1)} at step {step}  {'  '.join(shown)}"


def progress_lines(
    history: Sequence[Mapping[str, Any]], evaluated: str, before: Mapping[str, float], completions: int
) -> list[str]:
    """Return lines with reward and accuracy at the start and the end of training and of the evaluations.

    Args:
        history: `log_history` of a trainer's state.
        evaluated: description of the evaluation data, such as `64 rows`.
        before: metrics of the evaluation completions that were recorded before training; empty if there are none.
        completions: number of these completions.
    """
    lines = []
    changes = any(LATE_REWARD in entry for entry in history)
    for title, prefix in (("training", ""), ("evaluation", "eval_")):
        logs = [entry for entry in history if f"{prefix}reward" in entry]
        few = 1 if prefix else -(-len(logs) // 10)  # a tenth, as in the report
        parts, recorded = list[str](), list[str]()
        for heading, name, _ in _STEP_QUANTITIES[:3]:
            if changes and name == "reward" and not prefix:
                heading, name = "reward under the late weights", LATE_REWARD
            if values := [entry[prefix + name] for entry in logs if prefix + name in entry]:
                ends = [fmean(values[:few]), fmean(values[-few:])][len(values) == 1 :]
                parts.append(f"{heading} {' → '.join(f'{end:.3f}' for end in ends)}")
            if prefix and prefix + name in before:
                recorded.append(f"{heading} {before[prefix + name]:.3f}")
        if parts:
            which = f"(means of the first and last tenth of {len(logs)} logs)"
            if prefix:
                steps = " → ".join(str(step) for step in dict.fromkeys([logs[0]["step"], logs[-1]["step"]]))
                first = f"; before training, on the first {completions} completions: {', '.join(recorded)}"
                which = f"on {evaluated} (step {steps}{first if recorded else ''})"
            lines.append(f"{title:<12}{', '.join(parts)} {which}")
    accuracy = [entry[name] for entry in history for _, name, _ in _STEP_QUANTITIES[1:3] if name in entry]
    if accuracy and max(accuracy) < 0.01:
        cure = "look at completions in the report; try another model or --system_prompt_file"
        lines.append(f"Accuracy stayed near 0, so the accuracy reward gave no learning signal: {cure}.")
    return lines


def format_duration(seconds: float) -> str:
    """Format a duration: 45 s, 12 min, 3 h 05."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"


Colour = tuple[int, int, int]

# Blue and orange: distinguishable for colour-blind readers, and light enough for black text.
LOW_COLOUR: Colour = (67, 147, 195)
MIDDLE_COLOUR: Colour = (247, 247, 247)
HIGH_COLOUR: Colour = (224, 130, 20)


class Quantity(NamedTuple):
    """A per-token quantity: title, meaning of values below and above the middle, and whether it is a ratio.

    The middle of a ratio is 1, on a logarithmic scale; otherwise it is 0.
    """

    title: str
    below: str
    above: str
    is_ratio: bool = False


QUANTITIES = {
    "vgr": Quantity("vision gain ratio", "looks more", "looks less", is_ratio=True),
    "weights": Quantity("weight", "less of the credit", "more of the credit", is_ratio=True),
    "dependency": Quantity("dependency on the image", "", "depends on the image"),
    "advantages": Quantity("advantage", "made less likely", "made more likely"),
    "entropies": Quantity("entropy", "", "uncertain"),
    "logps": Quantity("log-probability", "unlikely", ""),
}
VERDICTS = {True: "right", False: "wrong", None: ""}  # by `Completion.correct`


def format_number(value: float | None) -> str:
    """Format a number with four significant digits; a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.4g}"


def format_rewards(completion: Completion) -> str:
    """Return the name and value of every reward on one line."""
    return ", ".join(f"{printable(name)} {format_number(value)}" for name, value in completion.rewards.items())


def preview(text: str, length: int | None) -> str:
    """Return the first `length` characters and the number of omitted ones; None: all."""
    if length is None or len(text) <= length:
        return text
    return f"{text[:length]}\n[… {len(text) - length} more characters]"


def color_tokens(completion: Completion, name: str) -> list[tuple[str, str, str]]:
    """Return text, value and CSS colour of each token; no colour where the quantity was not measured.

    Args:
        completion: of T tokens.
        name: of `QUANTITIES`.
    """
    values = completion.per_token()[name] or [None] * len(completion.tokens)
    colours = ["" if p is None else position_colour(p) for p in colour_positions(values, QUANTITIES[name].is_ratio)]
    return list(zip(map(printable, completion.tokens), map(format_number, values), colours, strict=True))


def colour_positions(values: Numbers, is_ratio: bool) -> Numbers:
    """Map values to colour positions in [-1, 1], with the middle at 0 and the same scale on both sides.

    The value farthest from the middle is at -1 or 1. None stays None.

    Args:
        values: finite numbers or None.
        is_ratio: the middle is 1 on a logarithmic scale, and values up to 0 are at -1; otherwise the middle is 0.
    """
    distances = list(values)
    if is_ratio:
        distances = [None if value is None else math.log(value) if value > 0 else -math.inf for value in values]
    farthest = max((abs(distance) for distance in distances if distance and math.isfinite(distance)), default=1.0)
    return [None if distance is None else max(-1.0, min(1.0, distance / farthest)) for distance in distances]


def position_colour(position: float) -> str:
    """Return the CSS colour of a position in [-1, 1]."""
    end = LOW_COLOUR if position < 0 else HIGH_COLOUR
    return "#" + "".join(f"{round(m + abs(position) * (e - m)):02x}" for m, e in zip(MIDDLE_COLOUR, end, strict=True))
