"""`vgr-trl data inspect PATH`: which rows of a set cannot be trained on, what the others cost, and how some look."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from vgr_trl.cli.flags.advice import one_sentence
from vgr_trl.cli.flags.arguments import DataArguments
from vgr_trl.cli.loading import load_processor, system_prompt_of
from vgr_trl.data.inspect.lengths import Budget
from vgr_trl.data.inspect.page import page
from vgr_trl.data.inspect.prompt_tokens import prompt_tokens
from vgr_trl.data.inspect.report import report
from vgr_trl.data.inspect.rows import Checks, Findings, inspect_rows
from vgr_trl.data.load import load_path, readable
from vgr_trl.data.rows.images.video import VideoOptions
from vgr_trl.data.rows.naming import FLAGS, keys_of
from vgr_trl.data.rows.skipped import SkippedRow
from vgr_trl.data.rows.text.special import special_tokens
from vgr_trl.demo.tiny_processor import build_processor
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.files import is_writable, publish, unfinished, write_whole

BUDGET = Budget()


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect, print what was found, write the page, and return 0; 1 with `--strict` if a row cannot be used."""
    flags = parser().parse_args(argv)
    with one_sentence():
        findings = run(flags)
    if not findings.usable:
        raise DataError(f"None of the {findings.rows} rows of {flags.path} can be used; see the reasons above.")
    return 1 if flags.strict and findings.bad else 0


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    made = argparse.ArgumentParser(prog="vgr-trl data inspect", description=__doc__, allow_abbrev=False)
    made.add_argument("path", help="a file, a folder, or a name on the hub")
    made.add_argument("--split", help="(default: train, or the only one)")
    made.add_argument("--dataset_config", help="configuration of a hub data set")
    made.add_argument("--dataset_streaming", action="store_true", help="read rows as they are needed, without a cache")
    made.add_argument("--max_rows", type=int, help="look at the first so many rows only")
    made.add_argument("--image_dir", help="folder that relative paths start from (default: the data's own)")
    columns = made.add_argument_group("columns and images, as in training")
    for option in fields(DataArguments):
        if option.name in FLAGS.values():
            columns.add_argument(f"--{option.name}", help=option.metadata["help"])
    for name in ("min_pixels", "max_pixels", "max_short_side"):
        columns.add_argument(f"--{name}", type=int, help="of images, as in training")
    columns.add_argument("--filter_big_images", action="store_true", help="leave out rows with images above these")
    made.add_argument("--no_solution", action="store_true", help="rows need no solution: no accuracy reward is used")
    made.add_argument("--strict", action="store_true", help="exit with status 1 if a row cannot be used")
    prompts = made.add_argument_group("prompts, as in training")
    prompts.add_argument("--system_prompt_file", help="text or Jinja2 template; an empty file: no system prompt")
    prompts.add_argument("--prompt_language", help="en (default) or zh")
    prompts.add_argument("--video_fps", type=float, default=2.0, help="frames of a second of video (default 2)")
    prompts.add_argument("--max_video_frames", type=int, default=16, help="most frames of a row (default 16)")
    tokens = made.add_argument_group("tokens")
    tokens.add_argument("--model", help="folder or hub name whose processor counts the tokens of prompts")
    tokens.add_argument("--model_revision", help="branch, tag or commit of a hub name")
    tokens.add_argument("--trust_remote_code", action="store_true", help="the model may bring its own code")
    tokens.add_argument("--tiny", action="store_true", help="count with the embedded demo's processor, byte by byte")
    tokens.add_argument("--max_prompt_length", type=int, help="as in training: longer prompts are left out")
    for name in ("max_completion_length", "num_generations", "prompts_per_step"):
        tokens.add_argument(f"--{name}", type=int, default=getattr(BUDGET, name), help="(default %(default)s)")
    written = made.add_argument_group("output")
    written.add_argument("--page", type=Path, default=Path("inspect.html"), help="(default inspect.html)")
    written.add_argument("--samples", type=int, default=12, help="questions on the page; 0: no page (default 12)")
    written.add_argument("--seed", type=int, default=0, help="of the questions drawn (default 0)")
    written.add_argument("--skipped", type=Path, help="list every row that cannot be used there, as JSONL")
    return made


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
        root=Path(flags.image_dir) if flags.image_dir else _root(Path(flags.path)),
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
    return path.parent if path.is_file() else path if path.is_dir() else Path()


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
