"""Write runs as one HTML file that opens from disk: curves, completions and thumbnails, up to a maximum size."""

import base64
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha1
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from vgr_trl.collapse import first_signs
from vgr_trl.reporting.records import (
    LOGS_FILE,
    Completion,
    RecordedImage,
    Run,
    is_webp,
    read_logs,
    read_run,
    read_thumbnail,
    records_folder,
    to_json_value,
)
from vgr_trl.utils import ConfigError, DataError, write_atomic

PAGE = "page.html"  # built from report_page/ by `make report-page`
DATA_PLACEHOLDER = "VGR_TRL_DATA_GOES_HERE"
MEGABYTE = 10**6
MIN_MEGABYTES, MAX_MEGABYTES = 1.0, 100.0  # megabytes

HIDDEN_CURVES = {"epoch", "step", "total_flos", "train_loss"} | {
    f"{mode}_{name}" for mode in ("train", "eval") for name in ("runtime", "samples_per_second", "steps_per_second")
}
TIME_CURVE = "time/seconds"  # seconds since the first log
ACCURACY_PATTERN = re.compile("rewards/.*accuracy.*/mean")
MAX_POINTS, MIN_POINTS = 1000, 50  # per curve
CURVES_SHARE = 0.3  # maximum share of the page
ATTENTION_SHARE = 0.5  # maximum share of the bytes of a run
MAX_RECORDS = 200  # read per run
_ZLIB_LEVEL = 6  # 9 takes 3.5 times as long for a page 2 % smaller

Key = TypeVar("Key")
AnsweredQuestion = tuple[list[dict[str, Any]], dict[str, str]]  # completions, and thumbnails in base64 by name


@dataclass(frozen=True)
class Report:
    """The written file: path, size in bytes, number of recorded steps in it, and notes for the reader by run."""

    path: Path
    size: int
    records: int
    notes: dict[str, list[str]]


@dataclass
class Curve:
    """A value over the steps of a run.

    Attributes:
        name: of the metric in training; in evaluation without `eval_`.
        mode: `train` or `eval`.
        steps: ascending.
        values: one per step, None where it is not finite.
    """

    name: str
    mode: str
    steps: list[int]
    values: list[float | None]

    def thin(self, points: int) -> "Curve":
        """Return at most `points` evenly spaced points, including the first and the last."""
        if (count := len(self.steps)) <= points:
            return self
        kept = [index * (count - 1) // (points - 1) for index in range(points)]
        return Curve(self.name, self.mode, [self.steps[i] for i in kept], [self.values[i] for i in kept])


@dataclass
class PageRun:
    """A run as the page reads it, as JSON.

    Attributes:
        name: unique among the runs of the page.
        model, created, rewards, options, changed: of the run's description; `changed` names the options that are not
            at their defaults, None where that is not known.
        notes: what the reader has to know.
        signs: of collapse, with the step at which each is first seen; then an evaluation that ends below its start.
        scores: what `vgr-trl evaluate` measured, without completions; None of a run that was trained.
        records: as JSON objects, in the order of their steps.
    """

    name: str
    model: str = ""
    created: str = ""
    rewards: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    changed: list[str] | None = None
    signs: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, Any] | None = None
    curves: list[Curve] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


def write_report(
    runs: Sequence[str | Path],
    path: str | Path,
    *,
    max_megabytes: float = 9.5,
    names: Sequence[str] | None = None,
    live: float | None = None,
) -> Report:
    """Write a page that shows `runs`, and return a summary of it.

    Args:
        runs: folders of runs (`output_dir`, or `rollouts` in it), and JSON files of `vgr-trl evaluate`.
        path: of the page, which is written atomically; its folder is created.
        max_megabytes: maximum size of the page, in [1, 100].
        names: names of the runs, in order; by default as recorded, else those of their folders.
        live: interval in seconds at which the page reloads itself; None: it does not.

    Raises:
        ConfigError: `max_megabytes` is out of range, or the number of names differs from the number of runs.
        DataError: a run has no records, or a later release wrote them.
    """
    if not MIN_MEGABYTES <= max_megabytes <= MAX_MEGABYTES:
        raise ConfigError(f"max_megabytes is {max_megabytes}: give a number in [{MIN_MEGABYTES:g}, {MAX_MEGABYTES:g}].")
    if names is not None and len(names) != len(runs):
        raise ConfigError(f"There are {len(names)} names for {len(runs)} runs: give one name per run, in order.")
    template, path = load_template(), Path(path)
    max_bytes = int((max_megabytes * MEGABYTE - len(template.encode())) * 3 / 4) - 1024  # base64: 4 letters for 3 bytes
    pages, images = build_page_runs([Path(run) for run in runs], max_bytes, names)
    content = [{**vars(page), "curves": [vars(curve) for curve in page.curves]} for page in pages]
    packed = zlib.compress(_encode_json({"version": 1, "live": live, "runs": content, "images": images}), _ZLIB_LEVEL)
    html = template.replace(DATA_PLACEHOLDER, base64.b64encode(packed).decode("ascii")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, html)
    return Report(path, len(html), sum(len(page.records) for page in pages), {page.name: page.notes for page in pages})


def load_template() -> str:
    """Return the HTML of the page, without data."""
    return files("vgr_trl.reporting").joinpath(PAGE).read_text(encoding="utf-8")


def build_page_runs(
    folders: Sequence[Path], max_bytes: int, names: Sequence[str] | None = None
) -> tuple[list[PageRun], dict[str, str]]:
    """Return the runs, and as many of their thumbnails (base64 by name) as fit."""
    found: list[tuple[PageRun, Path, Run | list[AnsweredQuestion]]] = []
    for name, path in zip(names or [""] * len(folders), folders, strict=True):
        if path.is_file():
            for model, (scores, answers) in read_evaluations(path).items():
                found.append(
                    (PageRun(": ".join(filter(None, (name or path.stem, model))), scores=scores), path, answers)
                )
            continue
        run, output_dir = read_run(path), records_folder(path).parent
        page = PageRun(name or run.name, rewards=run.rewards, changed=run.description.get("changed"))
        page.model, page.created = (str(run.description.get(key) or "") for key in ("model", "created"))
        page.options = to_json_value(run.description.get("options") or {})
        add_curves(page, output_dir)
        found.append((page, output_dir, run))
    pages = [page for page, _, _ in found]
    repeated = {name for name, count in Counter(page.name for page in pages).items() if count > 1}
    for page, path, _ in found:
        page.name += f" ({path})" if page.name in repeated else ""
    left = max_bytes - _thin_curves(pages, int(CURVES_SHARE * max_bytes))
    left -= sum(_compressed_size(page.options) for page in pages)
    images: dict[str, str] = {}
    for index, (page, _, source) in enumerate(found):
        room = left // (len(pages) - index)  # equal shares; unused bytes go to later runs
        if isinstance(source, list):
            left -= add_answers(page, source, images, room)
        elif source.steps():
            left -= add_records(page, source, images, room)
        else:
            page.notes.append("The run has no records of completions yet.")
    return pages, images


def read_evaluations(path: Path) -> dict[str, tuple[dict[str, Any], list[AnsweredQuestion]]]:
    """Read a file of `vgr-trl evaluate`: model (a single one is "") -> scores and answered questions.

    Raises:
        DataError: the file is not one of `vgr-trl evaluate`.
    """
    try:
        content = json.loads(path.read_bytes())
        models = content.get("models", {"": content})
        found = {}
        for model, scores in models.items():
            answers = list(map(_parse_question, scores.pop("records", [])))
            found[model] = scores | {"accuracy": float(scores["accuracy"])}, answers
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} was not written by vgr-trl evaluate: give the output_dir of a run, or an --output_file."
        ) from error


def _parse_question(item: Mapping[str, Any]) -> AnsweredQuestion:
    """Return the greedy and sampled completions of a question as JSON objects, and its thumbnails."""
    prompt, images = str(item.get("prompt") or item.get("problem") or ""), item.get("images", [])
    thumbnails = {each["file"]: each["thumbnail"] for each in images if is_webp(base64.b64decode(each["thumbnail"]))}
    question = sha1(f"{prompt} {sorted(thumbnails)}".encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:16]
    pictures = [RecordedImage(each["file"], each["width"], each["height"]) for each in images]
    solution, rewards = item.get("solution"), item.get("rewards", {})
    completions = []
    for number, (text, right, form) in enumerate(
        zip(
            [item["greedy"], *item["sampled"]],
            [item["correct"], *item["correct_sampled"]],
            [item["format"], *item["format_sampled"]],
            strict=True,
        )
    ):
        completion = Completion(question, 0, prompt, text, [text], None if solution is None else str(solution))
        completion.correct, completion.images = None if right is None else right == 1, pictures
        completion.rewards = {"format": form} | (rewards if number == 0 else {})
        completions.append(asdict(completion) | {"drawn": "sampled" if number else "greedy"})
    return completions, thumbnails


def add_answers(page: PageRun, answered: Sequence[AnsweredQuestion], images: dict[str, str], max_bytes: int) -> int:
    """Add questions that `vgr-trl evaluate` saved until the next does not fit; return the bytes used.

    Args:
        images: as in `add_records`.
    """
    left, shown = max_bytes, list[dict[str, Any]]()
    if not answered:
        page.notes.append("The completions were not saved: run vgr-trl evaluate with --save_completions.")
    for number, (completions, thumbnails) in enumerate(answered):
        new = {name: content for name, content in thumbnails.items() if name not in images}
        if (size := _compressed_size(completions) + sum(map(len, new.values()))) > left:
            page.notes.append(f"{number} of {len(answered)} questions are shown; the others exceed the maximum size.")
            break
        left, shown = left - size, shown + completions
        images |= new
    page.records = [{"step": 0, "mode": "eval", "time": 0, "completions": shown}] if shown else []
    return max_bytes - left


def add_curves(page: PageRun, output_dir: Path) -> None:
    """Add the curves of a run from its `logs.jsonl`, and signs of collapse."""
    entries = list(read_logs(records_folder(output_dir) / LOGS_FILE))
    if not entries:
        page.notes.append("The run has no logs yet, so there are no curves.")
    trained = {entry.step: entry for entry in entries if entry.mode == "train"}  # the last log of a repeated step
    signs = first_signs((step, trained[step].values) for step in sorted(trained))
    page.signs = [{"step": step, "seen": seen} for step, seen in signs]
    points: dict[tuple[str, str], dict[int, float | None]] = {}
    times = {step: entry.time for step, entry in trained.items() if entry.time > 0}
    if len(set(times.values())) > 1:
        points[TIME_CURVE, "train"] = {step: seconds - min(times.values()) for step, seconds in times.items()}
    for entry in entries:
        for name, value in entry.values.items():
            if name not in HIDDEN_CURVES:
                key = (name.removeprefix("eval_") if entry.mode == "eval" else name, entry.mode)
                finite = value if value is not None and math.isfinite(value) else None
                points.setdefault(key, {})[entry.step] = finite
    for (name, mode), by_step in points.items():
        if any(value is not None for value in by_step.values()):
            steps = sorted(by_step)
            page.curves.append(Curve(name, mode, steps, [by_step[step] for step in steps]))
            known = [(step, value) for step in steps if (value := by_step[step]) is not None]
            (first, before), (last, after) = known[0], known[-1]
            if mode == "eval" and ACCURACY_PATTERN.search(name) and after < before:
                seen = f"evaluation accuracy is below that of step {first}: "
                page.signs.append({"step": last, "seen": f"{seen}{100 * before:.1f} % → {100 * after:.1f} %"})
            if ACCURACY_PATTERN.search(name) and max(value for _, value in known) < 0.01:
                where = "evaluation" if mode == "eval" else "training"
                page.signs.append({"step": last, "seen": f"{where} accuracy is 0 throughout"})


def _thin_curves(pages: Sequence[PageRun], max_bytes: int) -> int:
    """Thin the curves until they fit; return their size in bytes."""
    points = 2 * MAX_POINTS
    size = max_bytes + 1
    while size > max_bytes and points > MIN_POINTS:
        points //= 2
        thinned = [[curve.thin(points) for curve in page.curves] for page in pages]
        size = sum(_compressed_size([vars(curve) for curve in curves]) for curves in thinned)
    for page, curves in zip(pages, thinned, strict=True):
        if (count := max((len(curve.steps) for curve in page.curves), default=0)) > points:
            page.notes.append(f"Curves show {points} of {count} logged steps, evenly spaced.")
        page.curves = curves
    return size


def add_records(page: PageRun, run: Run, images: dict[str, str], max_bytes: int) -> int:
    """Add records, the ends of evaluation and training first, until the next does not fit; return the bytes used.

    Args:
        images: thumbnails of the page in base64, by name; extended by those of the records.
    """
    left, attention_left = max_bytes, int(ATTENTION_SHARE * max_bytes)
    maps = maps_left_out = 0
    missing: set[str] = set()
    pairs = zip_longest(order_ends_first(run.steps("eval")), order_ends_first(run.steps("train")))
    order = [key for pair in pairs for key in pair if key is not None]  # alternately
    for record in filter(None, (run.record(*key) for key in order[:MAX_RECORDS])):
        pictures = [image for completion in record.completions for image in completion.images]
        names = {name for image in pictures for name in (image.file, image.perturbed) if name is not None}
        contents = {name: read_thumbnail(run.folder, name) for name in sorted(names - images.keys())}
        missing |= {name for name, content in contents.items() if content is None}
        thumbnails = {name: content for name, content in contents.items() if content is not None}
        attentions = [completion.attention for completion in record.completions]
        bare = [replace(completion, attention=None) for completion in record.completions]
        content = to_json_value(asdict(replace(record, completions=bare)))
        size = _compressed_size(content) + sum(map(len, thumbnails.values()))
        if size > left:
            break
        left -= size
        for completion, attention in zip(content["completions"], attentions, strict=True):
            if attention is not None:
                shown = to_json_value(asdict(attention))
                if (size := _compressed_size(shown)) <= min(left, attention_left):
                    completion["attention"] = shown
                    left, attention_left, maps = left - size, attention_left - size, maps + 1
                else:
                    maps_left_out += 1
        images |= {name: base64.b64encode(file).decode() for name, file in thumbnails.items()}
        page.records.append(content)
    page.records.sort(key=lambda record: (record["step"], record["mode"]))
    count, recorded, small = len(page.records), len(run.steps()), "to keep the page small."
    notes = {
        f"{count} of {recorded} recorded steps are shown, evenly spaced; the others exceed the maximum size or are "
        "unreadable.": count < recorded,
        f"Attention over the image is shown for {maps} of {maps + maps_left_out} completions, {small}": maps_left_out,
        f"{len(missing)} thumbnails are missing; grey is shown instead.": missing,
    }
    page.notes += [note for note, applies in notes.items() if applies]
    return max_bytes - left


def order_ends_first(keys: Sequence[Key]) -> list[Key]:
    """Reorder `keys` so that every prefix is spread evenly: first, last, middle, middles of the halves, …

    Example: [0, 1, 2, 3, 4] → [0, 4, 2, 1, 3].
    """
    order = dict.fromkeys((0, len(keys) - 1) if keys else ())  # an ordered set
    spans = [(0, len(keys) - 1)]
    for low, high in spans:  # grows while it is iterated
        if high - low > 1:
            middle = (low + high) // 2
            order[middle] = None
            spans += [(low, middle), (middle, high)]
    return [keys[index] for index in order]


def _encode_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def _compressed_size(content: Any) -> int:
    """Return the compressed size: a slight overestimate of the bytes it adds to the page."""
    return len(zlib.compress(_encode_json(content), _ZLIB_LEVEL))
