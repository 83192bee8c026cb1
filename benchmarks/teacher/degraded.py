"""The same digits in less noise, for a start that reads whole pictures and fails on degraded ones."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from methods.seeds import interval
from mosaics.model import teach
from mosaics.task import Row

from teacher.described import DescribedStart
from teacher.runs import TUNING, Method, Start
from vgr_trl.signals.perturbation import perturb_images

GROUND = 0.35  # brightest grey of the ground
READING = 2  # times as many steps of reading as in the other tasks
Kind = tuple[str, dict[str, Any]]  # a perturbation and its arguments

TRAINED: Kind = ("add_gaussian_noise", {"std": 70.0})
NEVER_TRAINED: dict[str, Kind] = {
    "stronger": ("add_gaussian_noise", {"std": 100.0}),
    "blurred": ("gaussian_blur", {"radius": 0.8}),
    "low resolution": ("lower_resolution", {"scale": 0.75}),
}
DEGRADED = {"degraded_by": TRAINED[0], "noise_std": TRAINED[1]["std"]}


def better_look(untouched: float, reward: float = 0.0, **options: Any) -> Method:
    """Return a method whose rollouts see degraded pictures, and whose teacher sees the originals.

    Args:
        untouched: share of prompts whose pictures stay as they are.
        reward: weight of the verified reward.
        options: of `DAPOConfig`.
    """
    taught = {"teacher_view": "original", "teacher_weights": "reference", "loss_terms": ["teacher_divergence"]}
    return Method({**DEGRADED, **taught, "degraded_untouched": untouched, "reward_weights": [reward], **options})


ALONE = {"num_generations": 1}
FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.05}
SLOWER = {"learning_rate": 2e-4}  # the best of three on the tuning seed for plain training on degraded pictures
LOOKS = {
    "start": Method(trains=False),
    "plain": Method(SLOWER),
    "plain, degraded": Method(DEGRADED | SLOWER),
    "better look, half untouched": better_look(0.5, **ALONE, **SLOWER),
    "control: teacher degraded too": better_look(0.5, teacher_view="clean", **ALONE, **SLOWER),
    "better look": better_look(0.0, **ALONE, **SLOWER),
    "better look, half untouched, reward": better_look(0.5, 1.0, **SLOWER),
    "better look, half untouched, teacher follows": better_look(0.5, **ALONE, **FOLLOWS, **SLOWER),
    "better look, half untouched, eight completions": better_look(0.5, **SLOWER),
    "better look, a quarter untouched": better_look(0.25, **ALONE, **SLOWER),
    "control: teacher sees another picture": Method(
        better_look(0.5, teacher_view="teacher_images", **ALONE, **SLOWER).options, {"teacher_images": "another"}
    ),
    "vision_opd, boxes": better_look(
        0.0, teacher_view="crop_to_box", plugin_options={"crop_margin": 0.0}, **ALONE, **SLOWER
    ),
}
DESCRIBED_LOOKS = {
    name: LOOKS[name] for name in ("start", "plain", "plain, degraded", "better look", "better look, half untouched")
}
LOOK_SWEEP = {
    f"{name}, {rate:g}": Method(LOOKS[name].options | {"learning_rate": rate})
    for name in ("plain, degraded", "better look, half untouched")
    for rate in (2e-4, 5e-4, 1e-3)
}


def degraded(rows: Sequence[Row], kind: Kind) -> list[Row]:
    """Return the rows with degraded pictures, drawn by their place."""
    name, parameters = kind
    places = enumerate(rows)
    return [
        row | {"image": perturb_images([row["image"]], name, parameters, seed=0, step=0, index=place)[0]}
        for place, row in places
    ]


class DegradedStart(Start):
    """A model that reads whole pictures."""

    task, taught = "degraded", TUNING  # a start takes longer than eight trainings

    def draw_rows(self, count: int, **options: Any) -> list[Row]:
        """Draw pictures with less noise, and the column `another`, the picture of the row before."""
        rows = super().draw_rows(count, **{"noise": GROUND} | options)
        return [row | {"another": before["image"]} for row, before in zip(rows, rows[-1:] + rows[:-1], strict=True)]

    def warm_up(self, rows: list[Row]) -> None:
        """Teach to read whole pictures."""
        steps = READING * self.settings.reading_steps
        teach(self.model, self.processor, rows, self.label, steps=steps, rate=2e-3, seed=TUNING)

    def scores(self, count: int) -> list[float]:
        """Return the accuracy on pictures as they are, and degraded as in training."""
        rows = self.test[: count // 2]
        return [self.answers(seen).accuracy for seen in (rows, degraded(rows, TRAINED))]

    def outcome(self) -> dict[str, float]:
        """Return the accuracy on held-out pictures as they are, degraded as in training, and otherwise."""
        fewer = self.test[: len(self.test) // 2]
        seen = {"accuracy": self.test, "degraded": degraded(self.test, TRAINED)}
        seen |= {name: degraded(fewer, kind) for name, kind in NEVER_TRAINED.items()}
        return {name: round(self.answers(rows).accuracy, 4) for name, rows in seen.items()}


class DegradedDescribedStart(DegradedStart, DescribedStart):
    """A model that reads whole pictures, and describes the digit before it names it."""

    task = "described degraded"


MEASURES = ("accuracy", "degraded", *NEVER_TRAINED)
HEADS = (
    "method", "seeds", "originals", *MEASURES[1:], "originals, against the start",
    "degraded, against plain on degraded", "at equal positions", "positions", "CPU seconds per step",
)  # fmt: skip


def look_row(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the row of a method: means over seeds, and differences to plain training on originals, by seed."""
    runs, plain, rival = (
        {line["seed"]: line for line in lines if line["method"] == method}
        for method in (name, "plain", "plain, degraded")
    )
    start = next(line for line in lines if line["method"] == "start")  # one model for all seeds
    means = [statistics.mean(run[measure] for run in runs.values()) for measure in MEASURES]
    gains = [
        difference([run[measure] - plain[seed][measure] for seed, run in sorted(runs.items()) if seed in plain])
        for measure in MEASURES
    ]
    compared = name not in ("plain", "start")
    cells = [f"{mean:.3f}" + f", {gain}" * (compared and bool(gain)) for mean, gain in zip(means, gains, strict=True)]
    lost, ahead, equal = "", "", ""
    if name != "start":
        lost = difference([run["accuracy"] - start["accuracy"] for run in runs.values()])
    if name not in ("start", "plain, degraded"):
        ahead = difference([run["degraded"] - rival[seed]["degraded"] for seed, run in runs.items() if seed in rival])
        pairs = [(run["course"], rival[seed]["course"]) for seed, run in sorted(runs.items()) if seed in rival]
        ends = [(own, others, min(own[-1][1], others[-1][1])) for own, others in pairs]
        equal = difference([score_at(own, end) - score_at(others, end) for own, others, end in ends])
    positions = statistics.mean(run["course"][-1][1] for run in runs.values()) / 1e6
    seconds = statistics.mean(run["CPU seconds per step"] for run in runs.values())
    spent = [f"{positions:.2f} M", f"{seconds:.3f}"] if name != "start" else ["", ""]
    return "| " + " | ".join([name, str(len(runs)), *cells, lost, ahead, equal, *spent]) + " |"


def difference(gains: Sequence[float]) -> str:
    """Return the mean of differences, and its 95 % interval by bootstrap over seeds where there are three."""
    ends = " to ".join(f"{end:+.3f}" for end in interval(gains)) if len(gains) >= 3 else ""
    return f"{statistics.mean(gains):+.3f}" + f" ({ends})" * bool(ends) if gains else ""


def score_at(course: Sequence[Sequence[float]], positions: float) -> float:
    """Return the accuracy on degraded pictures after so many positions, between points on a line."""
    return float(np.interp(positions, [point[1] for point in course], [point[3] for point in course]))
