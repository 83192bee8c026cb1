"""`vgr-trl data convert | merge | inspect`: sets of questions in one schema, and checked before training."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from vgr_trl.cli.arguments import DataArguments, one_sentence
from vgr_trl.cli.loading import load_processor, system_prompt_of
from vgr_trl.data import public_sets
from vgr_trl.data.columns import FLAGS, KEYS, Keys, keys_of
from vgr_trl.data.convert import (
    ROWS_PER_FILE,
    SKIPPED,
    WRITERS,
    Output,
    convert,
    figures,
    plot,
    report,
    statistics_in,
)
from vgr_trl.data.images import MAX_SHORT_SIDE, ImageLimits, VideoOptions, downloaded
from vgr_trl.data.inspect import Budget, Findings, inspect_rows, page, prompt_tokens
from vgr_trl.data.inspect import report as inspection_report
from vgr_trl.data.load import load_path
from vgr_trl.data.merge import MergeOptions, merge
from vgr_trl.data.prompts import special_tokens
from vgr_trl.data.public_sets import CONVERTERS, Converter, keep_ids, load_converter, read_ids, shuffle_choices
from vgr_trl.data.read import MEANT, Source, has_config, readable, splits_in
from vgr_trl.data.rows import RowOptions, SkippedRow
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.utils import ConfigError, DataError, is_writable, publish, unfinished, write_atomic

OUTPUT_SPLITS = tuple(dict.fromkeys(MEANT.values()))
JSONL_FLAGS = ("image_dir", *(f"{option.name}_key" for option in fields(Keys)))
TRAINING_FLAGS = (
    "dataset_config", "dataset_streaming", "image_dir", *FLAGS.values(), "min_pixels", "max_pixels", "max_short_side",
    "filter_big_images", "system_prompt_file", "prompt_language", "video_fps", "max_video_frames",
)  # fmt: skip
BUDGET = Budget()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit status.

    Raises:
        ConfigError: there is no such command.
    """
    commands = {
        "convert": (convert_main, "a public set, or files of your own, to one schema"),
        "merge": (merge_main, "several converted sets to one, split into train and test"),
        "inspect": (inspect_main, "check any set before training, and look at some of its rows"),
    }
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<10}{what}" for name, (_, what) in commands.items()]
        print("\n".join(["usage: vgr-trl data COMMAND [flags]", "", *lines]))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        raise ConfigError(f"There is no data command {name!r}: the commands are {', '.join(commands)}.")
    return commands[name][0](rest)


def convert_main(argv: Sequence[str] | None = None) -> int:
    """Convert, print what the set consists of, and return 0."""
    flags = convert_parser().parse_args(argv)
    with one_sentence():
        convert_run(flags)
    return 0


def convert_parser() -> argparse.ArgumentParser:
    """Return the flags of `convert`."""
    made = argparse.ArgumentParser(prog="vgr-trl data convert", allow_abbrev=False)
    sets = ", ".join(CONVERTERS)
    made.add_argument("source", help=f"what the set is: {sets}, or a reader of yours (my_sets.py:my_set)")
    made.add_argument("--dataset_name", help="name on the hub; the public sets' own names are known")
    made.add_argument("--dataset_path", help="folder with Parquet, JSONL or JSON files, or written by save_to_disk")
    made.add_argument("--data_files", nargs="+", default=(), help="files; arxivqa: corpus=a queries=b qrels=c")
    made.add_argument("--dataset_config", help="configuration, 'standard (4 options)' or vision of MMMU-Pro, e.g.")
    made.add_argument("--split", help="which split to read (default: test of mmmu_pro, else train)")
    made.add_argument("--output_split", choices=OUTPUT_SPLITS, help="what is written (default: the same)")
    made.add_argument("--question_id_file", type=Path, help="keep only these ids: one per line, or a JSON list")
    made.add_argument("--subset_size", type=int, help="stop after so many rows")
    made.add_argument("--shuffle_choices", action="store_true", help="put options in another order, letters balanced")
    made.add_argument("--seed", type=int, default=0, help="of shuffle_choices (default 0)")
    _add_output_flags(made)
    own = made.add_argument_group("jsonl only")
    own.add_argument("--image_dir", type=Path, help="folder that paths start from and stay in (default: the files')")
    for part, flag in FLAGS.items():
        names, known = dict.fromkeys((f"--{part}_key", f"--{flag}")), " or ".join(getattr(KEYS, part))
        own.add_argument(*names, dest=f"{part}_key", help=f"its column (default: {known})")
    return made


def _add_output_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags of what is written, which `convert` and `merge` share."""
    add = made.add_argument_group("output").add_argument
    add("--output_dir", "--out_dir", type=Path, required=True, help="folder; what is finished is not made again")
    add("--output_format", choices=WRITERS, default="parquet", help="Parquet with images, JSONL with paths")
    add("--rows_per_file", type=int, default=ROWS_PER_FILE, help="(default %(default)s)")
    add("--workers", type=int, default=2, help="processes that decode images; 0: none (default 2)")
    add("--plot", type=Path, help="draw what the set consists of: PNG, SVG or PDF (needs matplotlib)")
    add = made.add_argument_group("images").add_argument
    add("--min_pixels", type=int, help="enlarge smaller images to this area")
    add("--max_pixels", type=int, help="reduce larger images to this area")
    add("--max_short_side", type=int, default=MAX_SHORT_SIDE, help="of an image; 0: any (default %(default)s)")
    add("--max_image_pixels", type=int, help="leave out rows with larger images")


def _output(flags: argparse.Namespace, source: Source, **options: Any) -> Output:
    """Return where and how to write, or raise `ConfigError` if the files would be read as rows of `source`."""
    if flags.plot:
        figures()
    folder = flags.output_dir
    if source.dataset_path and folder.resolve().is_relative_to(Path(source.dataset_path).resolve()):
        raise ConfigError(
            f"output_dir is {folder}, within {source.dataset_path}, which is read: choose another folder."
        )
    limits = ImageLimits(flags.min_pixels, flags.max_pixels, flags.max_short_side or None, flags.max_image_pixels)
    written = {"kind": flags.output_format, "rows_per_file": flags.rows_per_file, "workers": flags.workers}
    return Output(folder, limits=limits, **written, **options)


def convert_run(flags: argparse.Namespace) -> None:
    """Convert as the flags say, and print and write down what the set consists of."""
    converter = load_converter(flags.source)
    source = _source(flags, converter)
    options = _jsonl_options(flags)
    is_own = flags.source == "jsonl"
    output = _output(
        flags,
        source,
        split=flags.output_split or _output_split(flags.split or converter.split),
        several_images=converter.several_images,
        regions=converter.regions or (is_own and public_sets.names_regions(source)),
        videos=is_own and (bool(flags.video_key) or public_sets.names_videos(source, options["keys"])),
        limit=flags.subset_size,
        root=source.folder() if flags.image_dir is None else flags.image_dir.absolute(),
    )
    candidates = converter.read(source, **options)
    ids = read_ids(flags.question_id_file) if flags.question_id_file else set()
    missing = set(ids)
    if ids:
        candidates = keep_ids(candidates, ids, missing)
    if flags.shuffle_choices:
        candidates = shuffle_choices(candidates, flags.seed)
    identity = {
        "set": flags.source,
        **source.identity(),
        **{name: getattr(flags, name) for name in ("shuffle_choices", "seed", *JSONL_FLAGS)},
        **{name: getattr(output, name) for name in ("kind", "rows_per_file", "limit")},
        **asdict(output.limits),
        "question_ids": sorted(ids),
    }
    convert(candidates, output, identity, converter.count(source))
    if missing and len(missing) < len(ids) and flags.subset_size is None:
        some = ", ".join(sorted(missing)[:3])
        print(f"No question has {len(missing)} ids of {flags.question_id_file}: {some}, …", file=sys.stderr)
    _show(flags.output_dir, flags.plot)


def _source(flags: argparse.Namespace, converter: Converter) -> Source:
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


def _output_split(split: str) -> str:
    """Return the name by which `datasets` finds a split again from the names of its files."""
    if split not in MEANT:
        raise ConfigError(f"The split is {split!r}: say what it becomes by --output_split {' | '.join(OUTPUT_SPLITS)}.")
    return MEANT[split]


def _jsonl_options(flags: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(flags, name) for name in JSONL_FLAGS if getattr(flags, name) is not None}
    if flags.source != "jsonl":
        if given:
            raise ConfigError(
                f"{', '.join(given)} is given, but only jsonl has it: the columns of {flags.source} are known."
            )
        return {}
    if flags.image_dir is not None and not flags.image_dir.is_dir():
        raise ConfigError(f"image_dir is {flags.image_dir}, which is not a folder.")
    keys = {FLAGS[name.removesuffix("_key")]: value for name, value in given.items() if name != "image_dir"}
    return {"keys": keys_of(**keys), "image_dir": flags.image_dir}


def _show(folder: Path, picture: Path | None) -> None:
    """Print what the sets in `folder` consist of, write it to `report.txt` there, and draw it if asked for."""
    statistics = statistics_in(folder)
    text = "\n".join(f"{split}: {report(counts)}" for split, counts in statistics.items())
    write_atomic(folder / "report.txt", text.encode())
    print(text)
    left_out = sum(counts.reasons.total() for counts in statistics.values())
    print(f"Rows are in {folder}" + (f"; {left_out:,} left out are listed in {folder / SKIPPED}." if left_out else "."))
    if picture is not None:
        plot(statistics, picture)


def merge_main(argv: Sequence[str] | None = None) -> int:
    """Merge, print what the result consists of, and return 0."""
    flags = merge_parser().parse_args(argv)
    with one_sentence():
        sources = [_set_source(text) for text in flags.sets]
        outputs = [_output(flags, source) for source in sources]
        weights = None if flags.weights is None else tuple(flags.weights)
        options = MergeOptions(weights, flags.test_share, flags.seed, flags.shuffle_choices)
        identity = {
            "sets": [source.identity() for source in sources],
            **asdict(options),
            **asdict(outputs[0].limits),
            **{name: getattr(outputs[0], name) for name in ("kind", "rows_per_file")},
        }
        surplus = merge(sources, outputs[0], options, identity)
        _show(flags.output_dir, flags.plot)
        if surplus:
            print(f"{surplus:,} rows more could be used, but are left out for the weights.")
    return 0


def merge_parser() -> argparse.ArgumentParser:
    """Return the flags of `merge`."""
    made = argparse.ArgumentParser(prog="vgr-trl data merge", allow_abbrev=False)
    made.add_argument("sets", nargs="+", help="folders that `convert` wrote, FOLDER:SPLIT for one split, or files")
    made.add_argument("--weights", nargs="+", type=float, help="one per set: their proportions (default: every row)")
    made.add_argument("--test_share", type=float, default=0.1, help="of the rows; 0: no split (default 0.1)")
    made.add_argument("--seed", type=int, default=0, help="of split, weights and order of options (default 0)")
    made.add_argument("--shuffle_choices", action="store_true", help="put options in another order, letters balanced")
    _add_output_flags(made)
    return made


def _set_source(text: str) -> Source:
    """Return the set that `FOLDER`, `FOLDER:SPLIT` or a file names."""
    path, split = Path(text), ""
    if not path.exists() and ":" in text:
        name, split = text.rsplit(":", 1)
        path = Path(name)
    if path.is_file():
        return Source(data_files=[str(path)])
    if not path.is_dir():
        raise ConfigError(f"There is no set at {text}: give a folder that `vgr-trl data convert` wrote, or a file.")
    splits = splits_in(path)
    if not split and len(splits) > 1:
        raise ConfigError(f"{path} has the splits {', '.join(splits)}: name one, as {path}:{splits[0]}.")
    return Source(dataset_path=str(path), split=split or (splits or ["train"])[0])


def inspect_main(argv: Sequence[str] | None = None) -> int:
    """Inspect, print what was found, write the page, and return 0; 1 with `--strict` if a row cannot be used."""
    flags = inspect_parser().parse_args(argv)
    with one_sentence():
        findings = inspect_run(flags)
    if not findings.usable:
        raise DataError(f"None of the {findings.rows} rows of {flags.path} can be used; see the reasons above.")
    return 1 if flags.strict and findings.bad else 0


def inspect_parser() -> argparse.ArgumentParser:
    """Return the flags of `inspect`; what a row must satisfy has the flags of training."""
    made = argparse.ArgumentParser(prog="vgr-trl data inspect", allow_abbrev=False)
    made.add_argument("path", help="a file, a folder, or a name on the hub")
    made.add_argument("--split", help="(default: train, or the only one)")
    made.add_argument("--max_rows", type=int, help="look at the first so many rows only")
    made.add_argument("--no_solution", action="store_true", help="rows need no solution: no accuracy reward is used")
    made.add_argument("--strict", action="store_true", help="exit with status 1 if a row cannot be used")
    training = made.add_argument_group("as in training")
    for option in fields(DataArguments):
        if option.name not in TRAINING_FLAGS:
            continue
        kind: dict[str, Any] = {"type": int} if "int" in str(option.type) else {"type": str}
        kind = {"type": float} if option.type is float else kind
        kind = {"action": "store_true"} if option.type is bool else kind | {"default": option.default}
        training.add_argument(f"--{option.name}", help=option.metadata["help"], **kind)
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


def inspect_run(flags: argparse.Namespace) -> Findings:
    """Inspect as the flags say, print the report, write page and list, and return what was found."""
    for name, least in (("max_rows", 1), ("samples", 0)):
        value = getattr(flags, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}: give an integer of at least {least}.")
    if flags.max_prompt_length is not None and not (flags.model or flags.tiny):
        raise ConfigError("max_prompt_length is given, but no model to count tokens with: add --model.")
    data = DataArguments(**{name: getattr(flags, name) for name in TRAINING_FLAGS})
    processor = _processor(flags)
    budget = Budget(flags.max_prompt_length, flags.max_completion_length, flags.num_generations, flags.prompts_per_step)
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
            dataset,
            _row_options(flags, data, processor),
            keys=keys_of(**vars(data)),
            length_of=None if processor is None else partial(prompt_tokens, processor),
            split=split,
            samples=flags.samples,
            seed=flags.seed,
            on_skipped=on_skipped,
        )
    print(inspection_report(findings, budget), end="")
    if processor is None:
        print("\nPrompts are not measured: name the model with --model.")
    if flags.skipped:
        print(f"\nThe rows that cannot be used are listed in {flags.skipped}.")
    if flags.samples:
        write_atomic(flags.page, page(findings, budget, flags.path, flags.seed))
        print(f"\n{len(findings.sample)} questions to look at are in {flags.page}.")
    return findings


def _processor(flags: argparse.Namespace) -> Any:
    if flags.tiny and flags.model:
        raise ConfigError("model and tiny are both given: drop one.")
    if flags.tiny:
        return build_processor([])
    return load_processor(flags.model, flags.model_revision, flags.trust_remote_code) if flags.model else None


def _row_options(flags: argparse.Namespace, data: DataArguments, processor: Any) -> RowOptions:
    path = Path(flags.path).absolute()
    root = path.parent if path.is_file() else path if path.is_dir() else downloaded()
    return RowOptions(
        root=Path(data.image_dir).absolute() if data.image_dir else root,
        needs_solution=not flags.no_solution,
        system_prompt=system_prompt_of(data),
        videos=VideoOptions(data.video_fps, data.max_video_frames),
        special=None if processor is None else special_tokens(processor),
        images=data.image_rule(),
    )


@contextmanager
def _listing(path: Path | None) -> Iterator[Callable[[SkippedRow], None]]:
    """A function that lists rows in the file at `path`, which appears when it is complete."""
    if path is None:
        yield lambda row: None
        return
    try:
        with unfinished(path).open("w", encoding="utf-8") as file:
            yield lambda row: print(json.dumps(asdict(row), default=str), file=file)
        publish(path)
    finally:
        unfinished(path).unlink(missing_ok=True)
