"""`vgr-trl data convert | merge | inspect | score`: sets of questions in one schema, checked before training."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from datasets import Dataset

from vgr_trl.boxes import BOX_COLUMNS
from vgr_trl.cli.arguments import DataArguments, load_processor, load_system_prompt, raise_config_errors
from vgr_trl.data.convert import (
    ROWS_PER_FILE,
    SKIPPED,
    Output,
    Rules,
    convert_subset,
    finished,
    statistics_in,
    working_folder,
    write_split,
)
from vgr_trl.data.counts import report, to_one_line
from vgr_trl.data.images import MAX_SHORT_SIDE, ImageLimits, VideoOptions, downloaded
from vgr_trl.data.inspect import Findings, InspectOptions, compare_splits, inspect_rows, page
from vgr_trl.data.inspect import report as inspection_report
from vgr_trl.data.lengths import PromptLengths
from vgr_trl.data.load import MEANT, has_config, load_path, load_split, readable
from vgr_trl.data.merge import merge
from vgr_trl.data.prompts import special_tokens
from vgr_trl.data.public_sets import CONVERTERS, Converter, load_converter, read_ids, shuffle_choices
from vgr_trl.data.read_row import FLAGS, KEYS, keys_of
from vgr_trl.data.rows import RowOptions, SkippedRow
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.rewards.answers import LETTERS, completion_text, is_right, resolve_solution, stated_answer
from vgr_trl.utils import ConfigError, DataError, RewardError, write_atomic

HELP = (
    "convert: a public set, or files of your own, to one schema. merge: several converted sets to one, split into "
    "train and test. inspect: check any set before training, and look at some of its rows. score: show how the "
    "accuracy reward reads completions."
)
NOT_OF_THE_ROWS = ("dataset_name", "dataset_path", "data_files", "sets", "output_dir", "workers", "page")
IMAGE_FLAGS = ("min_pixels", "max_pixels", "max_short_side")
TRAINING_FLAGS = (
    "dataset_config", "dataset_streaming", "image_dir", *FLAGS.values(), *IMAGE_FLAGS, "filter_big_images",
    "system_prompt_file", "prompt_language", "video_fps", "max_video_frames",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit status: 1 with `inspect --strict` if a row cannot be used."""
    parser = argparse.ArgumentParser(prog="vgr-trl data", description=HELP)
    parser.add_argument("command", choices=["convert", "merge", "inspect", "score"])
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the command: vgr-trl data COMMAND --help")
    chosen = parser.parse_args(argv)
    parsers = {"convert": convert_parser, "merge": merge_parser, "inspect": inspect_parser, "score": score_parser}
    runs = {"convert": convert_run, "merge": merge_run, "inspect": inspect_run, "score": score_run}
    flags = parsers[chosen.command]().parse_args(chosen.flags)
    with raise_config_errors():
        findings: Any = runs[chosen.command](flags)
    if findings is not None and not findings.usable:
        raise DataError(f"None of the {findings.rows} rows of {flags.path} can be used; see the reasons above.")
    return int(findings is not None and flags.strict and findings.usable < findings.rows)


def score_parser() -> argparse.ArgumentParser:
    """Return the flags of `score`."""
    made = argparse.ArgumentParser(prog="vgr-trl data score", allow_abbrev=False)
    made.add_argument(
        "path", type=Path, help="JSONL with output (or completion), solution and, if there are any, choices"
    )
    made.add_argument("--limit", type=int, help="read only the first so many lines")
    return made


def score_run(flags: argparse.Namespace) -> None:
    """Print for each completion its accuracy reward, the rule and words that state its answer, and the reference."""
    counts: Counter[str] = Counter()
    for number, line in enumerate(islice(flags.path.read_text("utf-8").splitlines(), flags.limit)):
        row = json.loads(line)
        try:
            text = completion_text(row["output"] if "output" in row else row.get("completion"))
            gold = resolve_solution(row.get("solution"), row.get("choices"))
        except RewardError as error:
            counts["left out"] += 1
            print(to_one_line(f"{number}: no reward: {error}"))
            continue
        found = stated_answer(text, gold.choices, is_open=gold.index is None)
        right, rule = is_right(text, gold), "no answer" if found is None else found.rule
        counts[rule] += 1
        counts["right"] += right
        words = "" if found is None else f" {shorten(found.part, 60)!r}"
        named = f"{LETTERS[gold.index]} ({gold.text})" if gold.choices and gold.index is not None else gold.text
        print(to_one_line(f"{number}: {int(right)} {rule}{words}, reference {shorten(named, 60)!r}"))
    rules = ", ".join(f"{name} {count}" for name, count in counts.most_common() if name != "right")
    print(f"{counts['right']} of {counts.total() - counts['right']} are right; {rules}.")


def _add_options(parser: argparse.ArgumentParser, declared: type, names: Sequence[str], title: str) -> None:
    """Add a group of those flags that the options of a dataclass declare."""
    group = parser.add_argument_group(title)
    for option in (option for option in fields(declared) if option.name in names):
        flags = [f"--{option.name}"]
        flags += [f"--{part}_key" for part, flag in FLAGS.items() if flag == option.name != f"{part}_key"]
        kind: Any = int if "int" in str(option.type) else float if option.type is float else str
        parsing = {"action": "store_true"} if option.type is bool else {"type": kind, "default": option.default}
        group.add_argument(*flags, help=option.metadata["help"], **parsing)


def convert_parser() -> argparse.ArgumentParser:
    """Return the flags of `convert`."""
    made = argparse.ArgumentParser(prog="vgr-trl data convert", allow_abbrev=False)
    sets = ", ".join(CONVERTERS)
    made.add_argument("source", help=f"what the set is: {sets}, or a reader of yours (my_sets.py:my_set)")
    made.add_argument("--data_files", nargs="+", default=(), help="files; arxivqa: corpus=a queries=b qrels=c")
    made.add_argument("--split", help="which split to read (default: test of mmmu_pro, else train)")
    made.add_argument("--output_split", choices=sorted(set(MEANT.values())), help="what is written (default: the same)")
    made.add_argument("--question_id_file", type=Path, help="keep only these ids: one per line, or a JSON list")
    made.add_argument("--subset_size", type=int, help="stop after so many rows")
    _add_output_flags(made)
    _add_options(made, DataArguments, ("dataset_name", "dataset_config", "dataset_path"), "source")
    _add_options(made, DataArguments, ("image_dir", *FLAGS.values()), "jsonl only")
    return made


def merge_parser() -> argparse.ArgumentParser:
    """Return the flags of `merge`."""
    made = argparse.ArgumentParser(prog="vgr-trl data merge", allow_abbrev=False)
    made.add_argument("sets", nargs="+", help="folders that `convert` wrote, FOLDER:SPLIT for one split, or files")
    made.add_argument("--test_share", type=float, default=0.1, help="of the rows; 0: no split (default 0.1)")
    _add_output_flags(made)
    return made


def _add_output_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags that `convert` and `merge` share."""
    add = made.add_argument_group("output").add_argument
    add("--output_dir", "--out_dir", type=Path, required=True, help="folder; what is finished is not made again")
    add("--rows_per_file", type=int, default=ROWS_PER_FILE, help="(default %(default)s)")
    add("--shuffle_choices", action="store_true", help="put options in another order, letters balanced")
    add("--seed", type=int, default=0, help="of split and order of options (default 0)")
    add("--workers", type=int, default=2, help="processes that decode images; 0: none (default 2)")
    add("--max_image_pixels", type=int, help="leave out rows with larger images")
    add("--filter_big_images", action="store_const", const=True, help="leave out rows with a side above 1024 pixels")
    add("--page", type=Path, help="also inspect the result, and write a page with some of its questions there")
    _add_options(made, DataArguments, IMAGE_FLAGS, "images")
    made.set_defaults(max_short_side=MAX_SHORT_SIDE)


def _output(flags: argparse.Namespace, rows: Any) -> Output:
    """Return where to write and what the result depends on: the flags, and the fingerprints of the source's rows."""
    identity = {name: value for name, value in vars(flags).items() if name not in NOT_OF_THE_ROWS} | {"rows": rows}
    return Output(flags.output_dir, identity, flags.rows_per_file)


def _require_outside(output_dir: Path, source: str | Path | None) -> None:
    """Raise `ConfigError` if the output would be written into a folder that is read."""
    if source and Path(source).is_dir() and output_dir.resolve().is_relative_to(Path(source).resolve()):
        raise ConfigError(f"output_dir {output_dir} is in {source}, which is read: choose another folder.")


def _limits(flags: argparse.Namespace) -> ImageLimits:
    short = flags.max_short_side or None
    return ImageLimits(flags.min_pixels, flags.max_pixels, short, flags.max_image_pixels, flags.filter_big_images)


def convert_run(flags: argparse.Namespace) -> None:
    """Convert as the flags say, and print and write down what the set consists of."""
    converter, keys = load_converter(flags.source), keys_of(**vars(flags))
    _require_outside(flags.output_dir, flags.dataset_path)
    load, source, folder = _source(flags, converter)
    if flags.source != "jsonl" and (keys != KEYS or flags.image_dir):
        raise ConfigError(f"image_dir and names of columns are for jsonl; those of {flags.source} are known.")
    asked = flags.split or converter.split
    split = flags.output_split or MEANT.get(asked)
    if split is None:
        raise ConfigError(f"The split is {asked!r}: say what it becomes by --output_split train, for example.")
    rows = load(None) if converter.join is None else converter.join(load)
    columns = ["images" if converter.several_images else "image", *["regions"] * converter.regions]
    if flags.source == "jsonl":
        known = {"videos": keys.video, "regions": tuple(BOX_COLUMNS)}
        columns += [name for name, names in known.items() if not {*names}.isdisjoint(rows.column_names)]
    output = _output(flags, rows._fingerprint)
    if not finished(split, output):
        root = Path(flags.image_dir).absolute() if flags.image_dir else folder
        rules = Rules(converter, source, keys, root, _limits(flags))
        ids = read_ids(flags.question_id_file) if flags.question_id_file else None
        with working_folder(output) as working:
            made = convert_subset(rows, rules, working, flags.workers, ids, flags.subset_size)
            made = shuffle_choices(made, flags.seed) if flags.shuffle_choices else made
            write_split(made, split, output, columns)
    _report(flags)


def _source(flags: argparse.Namespace, converter: Converter) -> tuple[Callable[[str | None], Any], str, Path]:
    """Return how to load the rows of a configuration, what they come from, and where relative paths start.

    A public set's own hub name is read where nothing is named.
    """
    is_named = flags.dataset_name or flags.dataset_path or flags.data_files
    name = flags.dataset_name if is_named else converter.hub_name
    default = flags.dataset_config
    if default is None and converter.config is not None:
        is_there = flags.dataset_path and has_config(Path(flags.dataset_path), converter.config)
        default = converter.config if name or is_there else None
    files = dict[str, list[Path]]()
    for file in flags.data_files:
        found = re.fullmatch(r"(?:([\w-]+)=)?(.*)", file, re.DOTALL)
        files.setdefault((found and found[1]) or "", []).append(Path(found[2] if found else file))
    folder = next(iter(files.values()))[0].absolute().parent if files else Path(flags.dataset_path or downloaded())

    def load(config: str | None) -> Any:
        if files and (config or "") not in files:
            raise DataError(f"data_files names no {config}, which is needed too: give it as {config}=FILE.")
        return load_split(
            (config or "") if files else flags.split or converter.split,
            dataset_name=name,
            dataset_config=config or default,
            dataset_path=flags.dataset_path,
            data_files=files or None,
            with_folders=False,
        )

    return load, name or flags.dataset_path or " ".join(flags.data_files), folder.absolute()


def _report(flags: argparse.Namespace) -> None:
    """Print what the sets in the output folder consist of, and write it to `report.txt` there."""
    statistics = statistics_in(flags.output_dir)
    texts = (f"{split}: {counts['sources'].total():,} rows\n{report(counts)}\n" for split, counts in statistics.items())
    text = "\n".join(texts)
    write_atomic(flags.output_dir / "report.txt", text.encode())
    left_out = sum(counts.get("reasons", Counter()).total() for counts in statistics.values())
    print(f"{text}\nRows are in {flags.output_dir}; {left_out:,} left out are listed in {flags.output_dir / SKIPPED}.")
    if flags.page:
        split, inspecting = next(iter(statistics)), inspect_parser()
        inspect_run(inspecting.parse_args([str(flags.output_dir), "--split", split, "--page", str(flags.page)]))


def merge_run(flags: argparse.Namespace) -> None:
    """Merge as the flags say, and print and write down what the result consists of."""
    sets = []
    for text in flags.sets:
        folder, _, asked = (text, "", "") if Path(text).exists() else text.rpartition(":")
        split, loads = load_path(folder or text, asked or None)
        if not asked and len(loads) > 1:
            raise ConfigError(f"{text} has the splits {', '.join(sorted(loads))}: name one, as {text}:{min(loads)}.")
        root = Path(folder or text).absolute()
        _require_outside(flags.output_dir, root)
        rules = Rules(CONVERTERS["jsonl"], text, root=root.parent if root.is_file() else root, limits=_limits(flags))
        sets.append((loads[split](), rules))
    output = _output(flags, [rows._fingerprint for rows, _ in sets])
    options = {"test_share": flags.test_share, "seed": flags.seed, "workers": flags.workers}
    merge(sets, output, shuffles_choices=flags.shuffle_choices, **options)
    _report(flags)


def inspect_parser() -> argparse.ArgumentParser:
    """Return the flags of `inspect`; what a row must satisfy has the flags of training."""
    made = argparse.ArgumentParser(prog="vgr-trl data inspect", allow_abbrev=False)
    made.add_argument("path", help="a file, a folder, or a name on the hub")
    made.add_argument("--split", help="(default: train, or the only one)")
    made.add_argument("--max_rows", type=int, help="look at the first so many rows only")
    made.add_argument("--no_solution", action="store_true", help="rows need no solution: no accuracy reward is used")
    made.add_argument("--strict", action="store_true", help="exit with status 1 if a row cannot be used")
    _add_options(made, DataArguments, TRAINING_FLAGS, "as in training")
    tokens = made.add_argument_group("tokens").add_argument
    tokens("--model", help="folder or hub name whose processor counts the tokens of prompts")
    tokens("--tiny", action="store_true", help="count with the embedded demo's processor, byte by byte")
    tokens("--model_revision", help="branch, tag or commit of a hub name")
    tokens("--trust_remote_code", action="store_true", help="the model may bring its own code")
    tokens("--max_prompt_length", type=int, help="as in training: longer prompts are left out")
    written = made.add_argument_group("output").add_argument
    written("--page", type=Path, default=Path("inspect.html"), help="(default inspect.html)")
    written("--samples", type=int, default=12, help="questions on the page; 0: no page (default 12)")
    written("--seed", type=int, default=0, help="of the questions drawn (default 0)")
    written("--skipped", type=Path, help="list every row that cannot be used there, as JSONL")
    return made


def inspect_run(flags: argparse.Namespace) -> Findings:
    """Inspect as the flags say, print the report, write page and list, and return what was found."""
    data = DataArguments(**{name: getattr(flags, name) for name in TRAINING_FLAGS})
    path = Path(flags.path).absolute()
    for output in (flags.page, flags.skipped):
        if output and (not output.parent.is_dir() or output.resolve() == path.resolve()):
            raise ConfigError(f"{output} cannot be written: give a file of its own in a folder that exists.")
    processor = build_processor([]) if flags.tiny else None
    if flags.model:
        processor = load_processor(flags.model, flags.model_revision, flags.trust_remote_code)
    root = path.parent if path.is_file() else path if path.is_dir() else downloaded()
    options = RowOptions(
        root=Path(data.image_dir).absolute() if data.image_dir else root,
        needs_solution=not flags.no_solution,
        system_prompt=load_system_prompt(data),
        videos=VideoOptions(data.video_fps, data.max_video_frames),
        special=special_tokens(processor) if processor else None,
        images=data.image_limits(),
    )
    streaming = flags.dataset_streaming
    split, loads = load_path(flags.path, flags.split, config=flags.dataset_config, streaming=streaming)
    compares = len(loads) > 1 and not streaming and flags.max_rows is None
    lengths = None if processor is None else PromptLengths(processor)
    looks = InspectOptions(options, keys_of(**vars(data)), lengths, digests=compares)

    def look(name: str, **more: Any) -> tuple[Findings, list[SkippedRow]]:
        dataset = loads[name]()
        if flags.max_rows is not None:
            dataset = dataset.take(
                min(flags.max_rows, len(dataset)) if isinstance(dataset, Dataset) else flags.max_rows
            )
        return inspect_rows(dataset, looks, split=name, **more)

    with readable(flags.path, "the path", only_reads=True):
        findings, skipped = look(split, samples=flags.samples, seed=flags.seed)
        if compares:
            compare_splits(findings, [look(other, samples=0)[0] for other in loads if other != split])
    if flags.skipped:
        flags.skipped.write_text("".join(json.dumps(asdict(row), default=str) + "\n" for row in skipped), "utf-8")
    print(inspection_report(findings, flags.max_prompt_length))
    if processor is None:
        print("Prompt lengths are not measured: name the model with --model.")
    if flags.samples:
        write_atomic(flags.page, page(findings, flags.max_prompt_length, flags.path, flags.seed))
        print(f"{len(findings.sample)} questions to look at are in {flags.page}.")
    return findings
