"""`vgr-trl data inspect PATH`: which rows of a set cannot be trained on, what the others cost, and how some look."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from vgr_trl.cli.flags.advice import one_sentence
from vgr_trl.cli.flags.arguments import DataArguments
from vgr_trl.data.inspect.cost import Budget
from vgr_trl.data.rows.naming import FLAGS
from vgr_trl.errors import DataError

BUDGET = Budget()


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect, print what was found, write the page, and return 0; 1 with `--strict` if a row cannot be used."""
    flags = parser().parse_args(argv)
    from vgr_trl.cli.data.inspecting import run  # after the flags: it imports torch

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
    made.add_argument("--image_dir", help="folder that paths start from and stay in (default: the data's own)")
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
