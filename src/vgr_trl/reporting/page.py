"""Write runs as one HTML file that opens from disk: curves, completions and thumbnails, up to a maximum size."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from vgr_trl.atomic_files import write_atomic
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.metrics.collapse import first_signs
from vgr_trl.options import check_value
from vgr_trl.reporting.records import (
    DAMAGED_ERRORS,
    IDENTITY_FILE,
    LOGS_FILE,
    Completion,
    RecordedImage,
    Run,
    encode_json,
    is_webp,
    question_id,
    read_logs,
    read_object,
    read_run,
    read_thumbnail,
    refuse_unwritable,
    to_json_value,
)

PAGE = "page.html"  # built from report_page/ by `make report-page`
DATA_PLACEHOLDER = "VGR_TRL_DATA_GOES_HERE"
MEGABYTE = 10**6

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

Page = dict[str, Any]  # a run as the page reads it
AddCompletions = Callable[[Page, dict[str, str], int], int]  # page, its thumbnails, maximum of bytes -> bytes used
AnsweredQuestion = tuple[list[dict[str, Any]], dict[str, str]]  # completions, and thumbnails in base64 by name


@dataclass(frozen=True)
class Report:
    """The written file: path, size in bytes, number of recorded steps in it, and notes for the reader by run."""

    path: Path
    size: int
    records: int
    notes: dict[str, list[str]]


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
        path: file of the page, which is written atomically; its folder is created.
        max_megabytes: maximum size of the page, in [1, 100].
        names: names of the runs, in order; by default the recorded names, or else the names of their folders.
        live: interval in seconds at which the page reloads itself; None: it does not.

    Raises:
        ConfigError: `max_megabytes` is out of range, the number of names differs from the number of runs, or `path` is
            something other than a page.
        DataError: a run has no records, or a later release wrote them.
    """
    check_value("max_megabytes", max_megabytes, float, ge=1, le=100)
    if names is not None and len(names) != len(runs):
        raise ConfigError(f"There are {len(names)} names for {len(runs)} runs: give one name per run, in order.")
    template, path = load_template(), Path(path)
    refuse_unwritable(path, "output", mark=b'"vgr-trl')  # begins a value of a `<meta>` tag
    max_bytes = int((max_megabytes * MEGABYTE - len(template.encode())) * 3 / 4) - 1024  # base64: 4 letters for 3 bytes
    pages, images = build_pages([Path(run) for run in runs], max_bytes, names)
    packed = zlib.compress(encode_json({"version": 1, "live": live, "runs": pages, "images": images}), _ZLIB_LEVEL)
    html = template.replace(DATA_PLACEHOLDER, base64.b64encode(packed).decode("ascii")).encode()
    write_atomic(path, html)
    notes = {page["name"]: page["notes"] for page in pages}
    return Report(path, len(html), sum(len(page["records"]) for page in pages), notes)


def load_template() -> str:
    """Return the HTML of the page, without data."""
    return Path(__file__).with_name(PAGE).read_text(encoding="utf-8")


def build_pages(
    paths: Sequence[Path], max_bytes: int, names: Sequence[str] | None = None
) -> tuple[list[Page], dict[str, str]]:
    """Convert runs to the page's format, with as many of their thumbnails (base64 by name) as fit.

    Args:
        paths: folders of runs, and files of `vgr-trl evaluate`.
        max_bytes: maximum size of everything, compressed.
        names: names of the runs, in order; None: as recorded.
    """
    sources: list[tuple[Page, Path, AddCompletions]] = []
    for name, path in zip(names or [""] * len(paths), paths, strict=True):
        if path.is_file():
            for model, (scores, answers) in read_evaluations(path).items():
                shown = ": ".join(filter(None, (name or path.stem, model)))
                sources.append((make_page(shown, {}, scores), path, partial(add_answers, answers)))
        else:
            run = read_run(path)
            about = {"setup": read_setup(run), "compared": read_comparison(run.folder.parent)}
            page = make_page(name or run.name, run.description) | about
            add_curves(page, run.folder)
            sources.append((page, run.folder.parent, partial(add_records, run)))
    pages = [page for page, _, _ in sources]
    named = [page["name"] for page in pages]
    for page, path, _ in sources:
        page["name"] += f" ({path})" * (named.count(page["name"]) > 1)
    left = max_bytes - _thin_curves(pages, int(CURVES_SHARE * max_bytes))
    left -= sum(_compressed_size(page["options"]) for page in pages)
    images: dict[str, str] = {}
    for index, (page, _, add_completions) in enumerate(sources):
        share = left // (len(pages) - index)  # equal shares; unused bytes go to later runs
        left -= add_completions(page, images, share)
    return pages, images


def make_page(name: str, description: Mapping[str, Any], scores: Mapping[str, Any] | None = None) -> Page:
    """Describe a run as `Run` of `report_page/src/data.ts`, without curves and records.

    Args:
        name: unique among the runs of the page.
        description: `description` of a `Run`.
        scores: scores of `vgr-trl evaluate`; None for a run that was trained.
    """
    model, created = (str(description.get(key) or "") for key in ("model", "created"))
    options = to_json_value(description.get("options") or {})
    page = {"name": name, "model": model, "created": created, "rewards": description.get("rewards", [])}
    page |= {"options": options, "changed": description.get("changed"), "scores": scores, "setup": {}, "compared": []}
    return page | {key: [] for key in ("notes", "signs", "curves", "records")}


def read_setup(run: Run) -> dict[str, str]:
    """Return the entries that the page lists before the options: recipe, data, rewards and the recorder's setup."""
    identity = read_object(run.folder.parent / IDENTITY_FILE)
    named = {name: identity.get(name) for name in ("recipe", "data", "dataset_train_split")}
    setup = {"model": run.description.get("model"), **named, "rewards": ", ".join(run.rewards)}
    setup |= run.description.get("setup") or {}
    return {name: str(value) for name, value in setup.items() if value}


def read_comparison(folder: Path) -> list[dict[str, Any]]:
    """Read the scores before and after training that `vgr-trl demo` writes, overall and per group."""
    try:
        content = to_json_value(read_object(folder / "metrics.json"))
        scores = {when: {"all": content[when], **content[when]["groups"]} for when in ("before", "after")}
        names = list(scores["before"])
        return [{"name": name} | {when: _pick_scores(scores[when][name]) for when in scores} for name in names]
    except DAMAGED_ERRORS:
        return []


def _pick_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    names = ("questions", "k", "accuracy", "interval", "mean_at_k", "format", "blind")
    return {name: scores[name] for name in names if name in scores}


def read_evaluations(path: Path) -> dict[str, tuple[dict[str, Any], list[AnsweredQuestion]]]:
    """Read a file of `vgr-trl evaluate`: name of the model ("" if there is only one) -> scores and answered questions.

    Raises:
        DataError: `vgr-trl evaluate` did not write the file.
    """
    try:
        content = to_json_value(json.loads(path.read_bytes()))
        models = content.get("models", {"": content})
        evaluations = {}
        for model, scores in models.items():
            answers = list(map(_parse_question, scores.pop("records", [])))
            evaluations[model] = scores | {"accuracy": float(scores["accuracy"])}, answers
        return evaluations
    except (OSError, *DAMAGED_ERRORS) as error:
        raise DataError(f"{path} was not written by vgr-trl evaluate: give an output_dir or output_file.") from error


def _parse_question(item: Mapping[str, Any]) -> AnsweredQuestion:
    """Parse a question's greedy and sampled completions, as JSON objects, and its thumbnails."""
    prompt, images = str(item.get("prompt") or item.get("problem") or ""), item.get("images", [])
    thumbnails = {img["file"]: img["thumbnail"] for img in images if is_webp(base64.b64decode(img["thumbnail"]))}
    question, solution = question_id(prompt, sorted(thumbnails)), item.get("solution")
    pictures = [RecordedImage(image["file"], image["width"], image["height"]) for image in images]
    greedy = item["greedy"], item["correct"], item["format"], "greedy"
    samples = zip(item["sampled"], item["correct_sampled"], item["format_sampled"], strict=True)
    completions = []
    for text, right, form, drawn in (greedy, *((*sample, "sampled") for sample in samples)):
        completion = Completion(question, 0, prompt, text, [text], None if solution is None else str(solution))
        completion.correct, completion.images = None if right is None else right == 1, pictures
        completion.rewards = {"format": form} | (item.get("rewards", {}) if drawn == "greedy" else {})
        completions.append(asdict(completion) | {"drawn": drawn})
    return completions, thumbnails


def add_answers(answered: Sequence[AnsweredQuestion], page: Page, images: dict[str, str], max_bytes: int) -> int:
    """Add questions that `vgr-trl evaluate` saved until the next does not fit; return the bytes used.

    Args:
        answered: questions with their completions and thumbnails.
        page: receives one record with all completions.
        images: thumbnails of the page in base64, by name; the questions' thumbnails are added.
        max_bytes: maximum of the bytes used.
    """
    left, shown = max_bytes, list[dict[str, Any]]()
    if not answered:
        page["notes"].append("The completions were not saved: run vgr-trl evaluate with --save_completions.")
    for number, (completions, thumbnails) in enumerate(answered):
        new = {name: content for name, content in thumbnails.items() if name not in images}
        if (size := _compressed_size(completions) + sum(map(len, new.values()))) > left:
            page["notes"].append(f"{number} of {len(answered)} questions are shown; the others are too large.")
            break
        left, shown = left - size, shown + completions
        images |= new
    page["records"] = [{"step": 0, "mode": "eval", "time": 0, "completions": shown}] if shown else []
    return max_bytes - left


def add_curves(page: Page, folder: Path) -> None:
    """Add the curves of a run from its `logs.jsonl`, and signs of collapse with the step at which each begins."""
    entries = list(read_logs(folder / LOGS_FILE))
    if not entries:
        page["notes"].append("The run has no logs yet, so there are no curves.")
    trained = {entry.step: entry for entry in entries if entry.mode == "train"}  # the last log of a repeated step
    values: dict[int, dict[str, float | None]] = {}  # a run's summary is another log of its last step
    for entry in entries:
        if entry.mode == "train":
            values.setdefault(entry.step, {}).update(entry.values)
    signs = first_signs((step, values[step]) for step in sorted(values))
    points: dict[tuple[str, str], dict[int, float | None]] = {}
    times = {step: entry.time for step, entry in trained.items() if entry.time > 0}
    if len(set(times.values())) > 1:
        points[TIME_CURVE, "train"] = {step: seconds - min(times.values()) for step, seconds in times.items()}
    for entry in entries:
        for name, value in entry.values.items():
            if name not in HIDDEN_CURVES:
                key = (name.removeprefix("eval_") if entry.mode == "eval" else name, entry.mode)
                points.setdefault(key, {})[entry.step] = to_json_value(value)
    for (name, mode), by_step in points.items():
        steps = sorted(by_step)
        defined = [(step, value) for step in steps if (value := by_step[step]) is not None]
        if not defined:
            continue
        page["curves"].append({"name": name, "mode": mode, "steps": steps, "values": [by_step[step] for step in steps]})
        if ACCURACY_PATTERN.search(name):
            (first, before), (last, after) = defined[0], defined[-1]
            if mode == "eval" and after < before:
                fall = f"{100 * before:.1f} % → {100 * after:.1f} %"
                signs.append((last, f"evaluation accuracy is below that of step {first}: {fall}"))
            if max(value for _, value in defined) < 0.01:
                where = "evaluation" if mode == "eval" else "training"
                signs.append((last, f"{where} accuracy is 0 throughout"))
    page["signs"] = [{"step": step, "seen": seen} for step, seen in signs]


def _thin_curves(pages: Sequence[Page], max_bytes: int) -> int:
    """Keep as many evenly spaced points of the curves as fit, first and last included; return their size in bytes."""
    points, size = 2 * MAX_POINTS, max_bytes + 1
    while size > max_bytes and points > MIN_POINTS:
        points //= 2
        thinned = [[_thin_curve(curve, points) for curve in page["curves"]] for page in pages]
        size = sum(map(_compressed_size, thinned))
    for page, curves in zip(pages, thinned, strict=True):
        if (count := max((len(curve["steps"]) for curve in page["curves"]), default=0)) > points:
            page["notes"].append(f"Curves show {points} of {count} logged steps, evenly spaced.")
        page["curves"] = curves
    return size


def _thin_curve(curve: dict[str, Any], points: int) -> dict[str, Any]:
    count = len(curve["steps"])
    kept = np.linspace(0, count - 1, min(count, points), dtype=int)
    return curve | {name: [curve[name][index] for index in kept] for name in ("steps", "values")}


def add_records(run: Run, page: Page, images: dict[str, str], max_bytes: int) -> int:
    """Add records, the ends of evaluation and training first, until the next does not fit; return the bytes used.

    Args:
        run: run whose records to read.
        page: receives the records.
        images: thumbnails of the page in base64, by name; the records' thumbnails are added.
        max_bytes: maximum of the bytes used.
    """
    if not run.steps():
        page["notes"].append("The run has no records of completions yet.")
    left, attention_left = max_bytes, int(ATTENTION_SHARE * max_bytes)
    maps = all_maps = 0
    missing: set[str] = set()
    pairs = zip_longest(order_ends_first(run.steps("eval")), order_ends_first(run.steps("train")))
    order = [key for pair in pairs for key in pair if key is not None]  # alternately
    for record in filter(None, (run.record(*key) for key in order[:MAX_RECORDS])):
        content = to_json_value(asdict(record))
        attention = [completion.pop("attention") for completion in content["completions"]]
        pictures = [image for item in record.completions for image in (*item.images, *item.teacher_images)]
        names = {name for image in pictures for name in (image.file, image.perturbed) if name is not None}
        files = {name: read_thumbnail(run.folder, name) for name in sorted(names - images.keys())}
        missing |= {name for name, file in files.items() if file is None}
        size = _compressed_size(content) + sum(len(file) for file in files.values() if file is not None)
        if size > left:
            break
        left -= size
        for completion, shown in zip(content["completions"], attention, strict=True):
            size, all_maps = _compressed_size(shown), all_maps + (shown is not None)
            fits = size <= min(left, attention_left)
            completion["attention"] = shown if fits else None
            if fits and shown is not None:
                left, attention_left, maps = left - size, attention_left - size, maps + 1
        images |= {name: base64.b64encode(file).decode() for name, file in files.items() if file is not None}
        page["records"].append(content)
    page["records"].sort(key=lambda record: (record["step"], record["mode"]))
    count, recorded = len(page["records"]), len(run.steps())
    if count < recorded:
        page["notes"].append(f"{count} of {recorded} recorded steps are shown; others are too large or unreadable.")
    if maps < all_maps:
        page["notes"].append(f"Attention over the image is shown for {maps} of {all_maps} completions, to save space.")
    if missing:
        page["notes"].append(f"{len(missing)} thumbnails are missing; grey is shown instead.")
    return max_bytes - left


def order_ends_first(keys: Sequence[Any]) -> list[Any]:
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


def _compressed_size(content: Any) -> int:
    """Return the compressed size: a slight overestimate of the bytes it adds to the page."""
    return len(zlib.compress(encode_json(content), _ZLIB_LEVEL))
