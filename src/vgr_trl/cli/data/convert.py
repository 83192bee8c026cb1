"""`vgr-trl data convert SOURCE`: a public set, or files of the user's own, to one schema."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from vgr_trl.cli.flags.advice import one_sentence
from vgr_trl.data.build.convert import ROWS_PER_FILE, Output, convert
from vgr_trl.data.build.converters import CONVERTERS, Converter, load_converter
from vgr_trl.data.build.plot import figures_for, plot
from vgr_trl.data.build.pool import Encoding
from vgr_trl.data.build.progress import SKIPPED, statistics_in
from vgr_trl.data.build.select import IdFilter, read_ids
from vgr_trl.data.build.sets import jsonl
from vgr_trl.data.build.sets.jsonl import Keys
from vgr_trl.data.build.shuffle import shuffle_choices
from vgr_trl.data.build.statistics import report
from vgr_trl.data.build.write import PARTS
from vgr_trl.data.read.sources import MEANT, Source, has_config
from vgr_trl.data.rows.images.sizes import MAX_SHORT_SIDE, ImageLimits
from vgr_trl.data.rows.naming import FLAGS
from vgr_trl.errors import ConfigError
from vgr_trl.files import write_whole

REPORT = "report.txt"
OUTPUT_SPLITS = tuple(dict.fromkeys(MEANT.values()))
JSONL_FLAGS = ("image_dir", *(f"{option.name}_key" for option in fields(Keys)))


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, print what the set consists of, and return 0."""
    flags = parser().parse_args(argv)
    with one_sentence():
        run(flags)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    made = argparse.ArgumentParser(prog="vgr-trl data convert", description=__doc__, allow_abbrev=False)
    made.add_argument(
        "source", help=f"what the set is: {', '.join(CONVERTERS)}, or a reader of yours (my_sets.py:my_set)"
    )
    made.add_argument("--dataset_name", help="name on the hub; the public sets' own names are known")
    made.add_argument("--dataset_path", help="folder with Parquet, JSONL or JSON files, or written by save_to_disk")
    made.add_argument("--data_files", nargs="+", default=(), help="files; arxivqa: corpus=a queries=b qrels=c")
    made.add_argument(
        "--dataset_config", help="configuration, 'standard (4 options)' or vision of MMMU-Pro for example"
    )
    made.add_argument("--split", help="which split to read (default: test of mmmu_pro, else train)")
    made.add_argument("--output_split", choices=OUTPUT_SPLITS, help="what is written (default: the same)")
    made.add_argument(
        "--question_id_file", type=Path, help="keep only the ids in this file, one per line or a JSON list"
    )
    made.add_argument("--subset_size", type=int, help="stop after so many rows")
    made.add_argument("--shuffle_choices", action="store_true", help="put options in another order, letters balanced")
    made.add_argument("--seed", type=int, default=0, help="of shuffle_choices (default 0)")
    add_output_flags(made)
    own = made.add_argument_group("jsonl only")
    own.add_argument(
        "--image_dir", type=Path, help="folder that paths start from and stay in (default: the files' own)"
    )
    for option in fields(Keys):
        names = dict.fromkeys((f"--{option.name}_key", f"--{FLAGS[option.name]}"))
        own.add_argument(*names, dest=f"{option.name}_key", help=f"its column (default: {' or '.join(option.default)})")  # type: ignore[arg-type]
    return made


def add_output_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags of what is written, which `convert` and `merge` share."""
    group = made.add_argument_group("output")
    group.add_argument(
        "--output_dir", "--out_dir", type=Path, required=True, help="folder; the same command continues in it"
    )
    group.add_argument(
        "--output_format", choices=PARTS, default="parquet", help="Parquet with images, JSONL with paths"
    )
    group.add_argument("--rows_per_file", type=int, default=ROWS_PER_FILE, help=f"(default {ROWS_PER_FILE})")
    group.add_argument("--workers", type=int, default=2, help="processes that decode images; 0: none (default 2)")
    group.add_argument("--plot", type=Path, help="draw what the set consists of: PNG, SVG or PDF (needs matplotlib)")
    images = made.add_argument_group("images")
    images.add_argument("--min_pixels", type=int, help="enlarge smaller images to this area")
    images.add_argument("--max_pixels", type=int, help="reduce larger images to this area")
    images.add_argument(
        "--max_short_side", type=int, default=MAX_SHORT_SIDE, help=f"of an image; 0: any (default {MAX_SHORT_SIDE})"
    )
    images.add_argument("--max_image_pixels", type=int, help="leave out rows with larger images")


def limits_of(flags: argparse.Namespace) -> ImageLimits:
    """Return the limits that the flags set."""
    return ImageLimits(flags.min_pixels, flags.max_pixels, flags.max_short_side or None, flags.max_image_pixels)


def run(flags: argparse.Namespace) -> None:
    """Convert as the flags say, and print and write down what the set consists of."""
    if flags.plot:
        figures_for(flags.plot)
    converter = load_converter(flags.source)
    source = source_of(flags, converter)
    options = _jsonl_options(flags)
    output = Output(
        folder=flags.output_dir,
        split=flags.output_split or output_split(flags.split or converter.split),
        kind=flags.output_format,
        several_images=converter.several_images,
        regions=converter.regions or (flags.source == "jsonl" and jsonl.names_regions(source)),
        videos=_has_videos(flags, source, options),
        rows_per_file=flags.rows_per_file,
        limit=flags.subset_size,
        workers=flags.workers,
        encoding=Encoding(_files_of(flags, source), limits_of(flags)),
    )
    refuse_within(flags.output_dir, source)
    candidates = converter.read(source, **options)
    ids = read_ids(flags.question_id_file) if flags.question_id_file else None
    wanted = None if ids is None else IdFilter(ids)
    if wanted is not None:
        candidates = wanted(candidates)
    if flags.shuffle_choices:
        candidates = shuffle_choices(candidates, flags.seed)
    identity = _identity(flags, source, output) | {"question_ids": None if ids is None else sorted(ids)}
    convert(candidates, output, identity, converter.count(source))
    if wanted is not None and wanted.missing:
        some = ", ".join(sorted(wanted.missing)[:3])
        print(f"No question has {len(wanted.missing)} ids of {flags.question_id_file}: {some}, …", file=sys.stderr)
    show(flags.output_dir, flags.plot)


def source_of(flags: argparse.Namespace, converter: Converter) -> Source:
    """Return where the rows come from; a public set's own hub name where nothing is named."""
    named = flags.dataset_name or flags.dataset_path or flags.data_files
    if not named and converter.hub_name is None:
        raise ConfigError(f"{flags.source} needs one of dataset_path, data_files and dataset_name.")
    name = flags.dataset_name if named else converter.hub_name
    config = flags.dataset_config
    if config is None and converter.config is not None:
        is_there = flags.dataset_path and has_config(Path(flags.dataset_path), converter.config)
        config = converter.config if name or is_there else None
    return Source(name, flags.dataset_path, flags.data_files, config, flags.split or converter.split)


def output_split(split: str) -> str:
    """Return the name by which `datasets` finds a split again from the names of its files.

    Raises:
        ConfigError: it knows no such split.
    """
    if split not in MEANT:
        raise ConfigError(f"The split is {split!r}: say what it becomes by --output_split {' | '.join(OUTPUT_SPLITS)}.")
    return MEANT[split]


def show(folder: Path, picture: Path | None) -> None:
    """Print what the sets in `folder` consist of, write it to `report.txt` there, and draw it if asked for."""
    statistics = statistics_in(folder)
    text = "\n".join(f"{split}: {report(counts)}" for split, counts in statistics.items())
    write_whole(folder / REPORT, text.encode())
    print(text)
    left_out = sum(counts.reasons.total() for counts in statistics.values())
    print(f"Rows are in {folder}" + (f"; {left_out:,} left out are listed in {folder / SKIPPED}." if left_out else "."))
    if picture is not None:
        plot(statistics, picture)


def _jsonl_options(flags: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(flags, name) for name in JSONL_FLAGS if getattr(flags, name) is not None}
    if flags.source != "jsonl":
        if given:
            raise ConfigError(
                f"{', '.join(given)} is given, but only jsonl has it: the columns of {flags.source} are known."
            )
        return {}
    for name, value in given.items():
        if not str(value):
            raise ConfigError(f"{name} is empty: give the name of a column, or leave the flag out.")
    keys = {name.removesuffix("_key"): (value,) for name, value in given.items() if name != "image_dir"}
    if flags.image_dir is not None and not flags.image_dir.is_dir():
        raise ConfigError(f"image_dir is {flags.image_dir}, which is not a folder.")
    return {"keys": Keys(**keys), "image_dir": flags.image_dir}


def _files_of(flags: argparse.Namespace, source: Source) -> Path:
    return source.folder() if flags.image_dir is None else flags.image_dir.absolute()


def _has_videos(flags: argparse.Namespace, source: Source, options: dict[str, Any]) -> bool:
    return flags.source == "jsonl" and (bool(flags.video_key) or jsonl.names_videos(source, options["keys"]))


def _identity(flags: argparse.Namespace, source: Source, output: Output) -> dict[str, Any]:
    options = {name: getattr(flags, name) for name in ("shuffle_choices", "seed", *JSONL_FLAGS)}
    written = {name: getattr(output, name) for name in ("kind", "rows_per_file", "limit")}
    return {"set": flags.source, **source.identity(), **options, **written, **asdict(output.encoding.limits)}


def refuse_within(folder: Path, source: Source) -> None:
    """Refuse an output folder whose files would be read as rows of `source`."""
    if source.dataset_path and folder.resolve().is_relative_to(Path(source.dataset_path).resolve()):
        raise ConfigError(
            f"output_dir is {folder}, within {source.dataset_path}, which is read: choose another folder."
        )
