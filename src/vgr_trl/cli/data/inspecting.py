"""What `vgr-trl data inspect` does once its flags are read."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from vgr_trl.cli.flags.arguments import DataArguments
from vgr_trl.cli.loading import load_processor, system_prompt_of
from vgr_trl.data.inspect.cost import Budget
from vgr_trl.data.inspect.findings import Checks, Findings, inspect_rows
from vgr_trl.data.inspect.page import page
from vgr_trl.data.inspect.prompt_tokens import prompt_tokens
from vgr_trl.data.inspect.tables import report
from vgr_trl.data.load import load_path
from vgr_trl.data.read.failures import readable
from vgr_trl.data.rows.images.places import downloaded
from vgr_trl.data.rows.images.video import VideoOptions
from vgr_trl.data.rows.naming import FLAGS, keys_of
from vgr_trl.data.rows.skipped import SkippedRow
from vgr_trl.data.rows.text.special import special_tokens
from vgr_trl.demo.tiny_processor import build_processor
from vgr_trl.errors import ConfigError
from vgr_trl.files import is_writable, publish, unfinished, write_whole


def run(flags: argparse.Namespace) -> Findings:
    """Inspect as the flags say, print the report, write page and list, and return what was found."""
    checks, budget = checks_of(flags), budget_of(flags)
    taken = [Path(flags.path).resolve()]
    for path in filter(None, (flags.page if flags.samples else None, flags.skipped)):
        if not path.parent.is_dir() or not is_writable(path):
            raise ConfigError(f"{path} cannot be written: give a file in a folder that exists.")
        if path.resolve() in taken:
            raise ConfigError(f"{path} is named twice, and would be overwritten: give another --page or --skipped.")
        taken.append(path.resolve())
    split, dataset = load_path(flags.path, flags.split, config=flags.dataset_config, streaming=flags.dataset_streaming)
    if flags.max_rows is not None:
        dataset = dataset.take(flags.max_rows)
    with _listing(flags.skipped) as on_skipped, readable(flags.path, "the path", only_reads=True):
        findings = inspect_rows(
            dataset, checks, split=split, samples=flags.samples, seed=flags.seed, on_skipped=on_skipped
        )
    print(report(findings, budget), end="")
    if checks.length_of is None:
        print("\nPrompts are not measured: name the model with --model.")
    if flags.skipped:
        print(f"\nThe rows that cannot be used are listed in {flags.skipped}.")
    if flags.samples:
        write_whole(flags.page, page(findings, budget, flags.path, flags.seed))
        print(f"\n{len(findings.sample)} questions to look at are in {flags.page}.")
    return findings


def checks_of(flags: argparse.Namespace) -> Checks:
    """Return what a row must satisfy."""
    for name, least in (("max_rows", 1), ("samples", 0)):
        value = getattr(flags, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}: give an integer of at least {least}.")
    same = ("image_dir", "min_pixels", "max_pixels", "max_short_side", "filter_big_images", *FLAGS.values())
    data = DataArguments(
        **{name: getattr(flags, name) for name in same},
        system_prompt_file=flags.system_prompt_file,
        prompt_language=flags.prompt_language,
        video_fps=flags.video_fps,
        max_video_frames=flags.max_video_frames,
    )
    processor = _processor(flags)
    return Checks(
        root=Path(flags.image_dir).absolute() if flags.image_dir else _root(Path(flags.path).absolute()),
        needs_solution=not flags.no_solution,
        system_prompt=system_prompt_of(data),
        videos=VideoOptions(data.video_fps, data.max_video_frames),
        length_of=None if processor is None else partial(prompt_tokens, processor),
        special=None if processor is None else special_tokens(processor),
        keys=keys_of(**vars(data)),
        images=data.image_rule(),
    )


def budget_of(flags: argparse.Namespace) -> Budget:
    """Return limits and completions of a step."""
    if flags.max_prompt_length is not None and not (flags.model or flags.tiny):
        raise ConfigError("max_prompt_length is given, but no model to count tokens with: add --model.")
    return Budget(flags.max_prompt_length, flags.max_completion_length, flags.num_generations, flags.prompts_per_step)


def _processor(flags: argparse.Namespace) -> Any:
    if flags.tiny and flags.model:
        raise ConfigError("model and tiny are both given: drop one.")
    if flags.tiny:
        return build_processor([])
    if flags.model:
        return load_processor(flags.model, flags.model_revision, flags.trust_remote_code)
    return None


def _root(path: Path) -> Path:
    return path.parent if path.is_file() else path if path.is_dir() else downloaded()


@contextmanager
def _listing(path: Path | None) -> Iterator[Callable[[SkippedRow], None]]:
    """A function that lists rows in the file at `path`, which appears when it is whole."""
    if path is None:
        yield lambda row: None
        return
    try:
        with unfinished(path).open("w", encoding="utf-8") as file:
            yield lambda row: print(json.dumps(asdict(row), default=str), file=file)
        publish(path)
    finally:
        unfinished(path).unlink(missing_ok=True)
