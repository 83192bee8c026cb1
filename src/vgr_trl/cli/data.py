"""`vgr-trl data convert | merge | inspect | score`: sets of questions in a single schema, checked before training."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from datasets import Dataset, concatenate_datasets

from vgr_trl.atomic_files import write_atomic
from vgr_trl.cli.arguments import (
    DataArguments,
    image_root,
    load_processor,
    raise_config_errors,
    row_rules,
    source_name,
)
from vgr_trl.data.checked_rows import REASON, RowOptions
from vgr_trl.data.convert import (
    CONVERTERS,
    SKIPPED,
    Rules,
    columns_of,
    convert_rows,
    has_one_image,
    load_converter,
    merge,
    prepare_folder,
    read_ids,
    shuffle_choices,
    write_rows,
)
from vgr_trl.data.images import MAX_SHORT_SIDE, downloaded
from vgr_trl.data.inspect import Findings, inspect_rows, page, to_one_line
from vgr_trl.data.load import MEANT, load_path, load_split, parse_data_files, readable
from vgr_trl.data.prompts import PromptLengths
from vgr_trl.data.read_row import FLAGS, keys_of, require_columns
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.options import check_value
from vgr_trl.reporting.records import refuse_unwritable
from vgr_trl.rewards.answers import LETTERS, completion_text, is_right, resolve_solution, stated_answer

SOURCE = ("dataset_name", "dataset_config", "dataset_path")
COLUMNS = ("image_dir", *FLAGS)
ALIASES = {"problem_key": "--prompt_key", "solution_key": "--answer_key"}
IMAGES = ("min_pixels", "max_pixels", "max_short_side", "filter_big_images")
PROMPTS = ("system_prompt_file", "prompt_language", "video_fps", "max_video_frames")
READING = ("dataset_config", "dataset_streaming", *COLUMNS, *IMAGES, *PROMPTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit status: 1 with `inspect --strict` if a row cannot be used."""
    flags = make_parser().parse_args(argv)
    commands = {"convert": convert_run, "merge": merge_run, "inspect": inspect_run, "score": score_run}
    with raise_config_errors():
        findings: Any = commands[flags.command](flags)
    if findings is not None and not findings.usable:
        raise DataError(f"None of the {findings.rows} rows of {flags.path} can be used; see the reasons above.")
    return int(findings is not None and flags.strict and findings.usable < findings.rows)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all four commands; rules for rows have the flags of training."""
    parser = argparse.ArgumentParser(prog="vgr-trl data", description="Prepare and check sets of questions.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *options: str) -> Callable[..., Any]:
        made = commands.add_parser(name, allow_abbrev=False, help=text, description=text)
        for option in (option for option in fields(DataArguments) if option.name in options):
            flags = [f"--{option.name}", *filter(None, [ALIASES.get(option.name)])]
            kind: Any = int if "int" in str(option.type) else float if option.type is float else str
            parsing = {"action": "store_true"} if option.type is bool else {"type": kind, "default": option.default}
            made.add_argument(*flags, help=option.metadata["help"], **parsing)
        return made.add_argument

    convert = command("convert", "Convert a public set, or your own files, to one schema.", *SOURCE, *COLUMNS, *IMAGES)
    convert("source", help=f"the set: {', '.join(CONVERTERS)}, or your own reader (my_sets.py:my_set)")
    convert("--data_files", nargs="+", help="files; arxivqa: corpus=a queries=b qrels=c")
    convert("--split", help="split to read (default: test for mmmu_pro, else train)")
    convert("--output_split", choices=sorted({*MEANT.values()}), help="split to write (default: the same)")
    convert("--question_id_file", type=Path, help="keep only these ids: one per line, or a JSON list")
    convert("--subset_size", type=int, help="stop after N rows")
    merge = command("merge", "Merge several sets into one, split into train and test.", *IMAGES)
    merge("sets", nargs="+", help="folders that `convert` wrote, FOLDER:SPLIT for one split, or files")
    merge("--test_share", type=float, default=0.1, help="share of the test split; 0: no split (default 0.1)")
    for name, add in {"convert": convert, "merge": merge}.items():
        add("--output_dir", "--out_dir", type=Path, required=True, help="output folder; replaces an earlier result")
        add("--shuffle_choices", action="store_true", help="shuffle the choices, with balanced right letters")
        add("--seed", type=int, default=0, help="seed of split and shuffle (default 0)")
        add("--workers", type=int, default=2, help="worker processes for decoding; 0: none (default 2)")
        add("--page", type=Path, help="inspect the result, and write some questions to this HTML file")
        commands.choices[name].set_defaults(max_short_side=MAX_SHORT_SIDE)
    inspect = command("inspect", "Check a set before training, and look at some rows.", *READING)
    inspect("path", help="a file, a folder, or a name on the hub")
    inspect("--split", help="(default: train, or the only one)")
    inspect("--max_rows", type=int, help="read only the first N rows")
    inspect("--no_solution", action="store_true", help="accept rows without a solution: no accuracy reward is used")
    inspect("--strict", action="store_true", help="exit with status 1 if a row cannot be used")
    inspect("--model", help="model (folder or hub name) whose processor counts prompt tokens")
    inspect("--tiny", action="store_true", help="count with the embedded demo's processor, byte by byte")
    inspect("--model_revision", help="branch, tag or commit of a hub name")
    inspect("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    inspect("--max_prompt_length", type=int, help="count longer prompts, which training skips")
    inspect("--page", type=Path, help="write some of the questions to this HTML file")
    inspect("--samples", type=int, default=12, help="questions on the page; 0: no page (default 12)")
    inspect("--seed", type=int, default=0, help="seed for drawing the questions (default 0)")
    inspect("--skipped", type=Path, help="JSONL file for the rows that cannot be used, with reasons")
    score = command("score", "Show how the accuracy reward reads completions.")
    score("path", type=Path, help="JSONL file with output (or completion), solution and optional choices")
    score("--limit", type=int, help="read only the first N lines")
    return parser


def _data_arguments(flags: argparse.Namespace) -> DataArguments:
    names = {option.name for option in fields(DataArguments)}
    return DataArguments(**{name: value for name, value in vars(flags).items() if name in names})


def convert_run(flags: argparse.Namespace) -> None:
    """Convert a set to the schema, and print and write its composition."""
    converter, data = load_converter(flags.source), _data_arguments(flags)
    asked = flags.split or converter.split
    split = flags.output_split or MEANT.get(asked)
    if split is None:
        raise ConfigError(f"The split {asked!r} needs a name in the result: give --output_split, for example train.")
    if not (data.dataset_name or data.dataset_path or data.data_files):
        data = replace(data, dataset_name=converter.hub_name)
    source = data.source() | {"with_folders": False}
    source["dataset_config"] = data.dataset_config or converter.config
    if data.data_files and converter.join is None:  # files of the requested split, whatever their split is named
        source["data_files"] = {asked: list(chain(*parse_data_files(data.data_files).values()))}

    def load(config: str) -> Any:
        return load_split(config if data.data_files else asked, **source | {"dataset_config": config})

    rows: Any = load_split(asked, **source) if converter.join is None else converter.join(load)
    root, keys, limits = image_root(data, asked, rows), keys_of(**vars(flags)), data.image_limits()
    check_value("subset_size", flags.subset_size, int | None, ge=1)
    ids = read_ids(flags.question_id_file) if flags.question_id_file else None
    rules = Rules(converter, source_name(data), keys, root, limits, ids, flags.subset_size)
    columns = columns_of([(rows, rules)], converter.several_images)
    with prepare_folder(flags.output_dir, [data.dataset_path]) as working:
        rows = convert_rows(rows, rules, columns, working, flags.workers)
        sides = {split: [number for number, reason in enumerate(rows[REASON]) if reason is None]}
        _write(flags, rows, sides, columns, Path(working))


def merge_run(flags: argparse.Namespace) -> None:
    """Merge several sets into one, and print and write its composition."""
    limits, sets, read = _data_arguments(flags).image_limits(), [], []
    for text in flags.sets:
        path, _, asked = (text, "", "") if Path(text).exists() else text.rpartition(":")
        split, loads = load_path(path or text, asked or None)
        if not asked and len(loads) > 1:
            raise ConfigError(f"{text} has the splits {', '.join(sorted(loads))}: name one, as {text}:{min(loads)}.")
        read.append(path or text)
        root = Path(path or text).absolute()
        rules = Rules(CONVERTERS["jsonl"], text, root=root, limits=limits, hashes=True)
        sets.append((loads[split](), replace(rules, root=root.parent) if root.is_file() else rules))
    columns = columns_of(sets, several_images=not all(has_one_image(rows) for rows, _ in sets))
    with prepare_folder(flags.output_dir, read) as working:
        parts = [convert_rows(rows, rules, columns, working, flags.workers) for rows, rules in sets]
        rows, sides = merge(concatenate_datasets(parts), flags.test_share, flags.seed)
        _write(flags, rows, sides | {"validation": []}, columns, Path(working))


def _write(
    flags: argparse.Namespace, rows: Dataset, sides: dict[str, list[int]], columns: list[str], working: Path
) -> None:
    if flags.shuffle_choices:
        rows = shuffle_choices(rows, sides.values(), flags.seed)
    text = write_rows(rows, sides, columns, working, flags.output_dir)
    left_out = len(rows) - sum(map(len, sides.values()))
    print(f"{text}\nRows are in {flags.output_dir}; {left_out:,} skipped are listed in {flags.output_dir / SKIPPED}.")
    if flags.page:
        words = ["inspect", str(flags.output_dir), "--split", next(iter(sides)), "--page", str(flags.page)]
        inspect_run(make_parser().parse_args(words))


def inspect_run(flags: argparse.Namespace) -> Findings:
    """Inspect a set, print the report, write page and list of skipped rows, and return the findings."""
    data, path = _data_arguments(flags), Path(flags.path).absolute()
    for option, output, mark in (("page", flags.page, b'"vgr-trl'), ("skipped", flags.skipped, b'{"split": ')):
        if output:
            refuse_unwritable(output, option, mark=mark)
    processor = build_processor([]) if flags.tiny else None
    if flags.model:
        processor = load_processor(flags.model, flags.model_revision, flags.trust_remote_code)
    root = path.parent if path.is_file() else path if path.is_dir() else downloaded()
    keys = keys_of(**vars(data))
    check = partial(require_columns, needs_solution=not flags.no_solution, keys=keys, is_part=True)
    streaming, config = data.dataset_streaming, data.dataset_config
    split, loads = load_path(flags.path, flags.split, config=config, streaming=streaming, check=check)
    lengths = None if processor is None else PromptLengths(processor)
    other_splits = [name for name in loads if name != split and not streaming and flags.max_rows is None]
    with readable(flags.path, "the path", only_reads=True):
        rows = loads[split]()
        if flags.max_rows is not None:
            rows = rows.take(min(flags.max_rows, len(rows)) if isinstance(rows, Dataset) else flags.max_rows)
        root = image_root(data, split, rows) if data.image_dir else root
        options = RowOptions(needs_solution=not flags.no_solution, **row_rules(data, root, processor))
        inspect = partial(inspect_rows, options=options, keys=keys, hashes=bool(other_splits))
        drawing = {"samples": flags.samples, "seed": flags.seed, "limit": flags.max_prompt_length}
        findings = inspect(rows, split=split, lengths=lengths, **drawing)
        for name in other_splits:
            digests = inspect(loads[name](), split=name, samples=0).digests
            if shared := sum(findings.digests[image] for image in findings.digests.keys() & digests.keys()):
                findings.text += f"\n{shared:,} rows of {split} have an image that is also in {name}."
    if flags.skipped:
        lines = [json.dumps(asdict(row), default=str) + "\n" for row in findings.skipped]
        write_atomic(flags.skipped, "".join(lines).encode())
    print(findings.text + "\n")
    if processor is None:
        print("Prompt lengths not measured; pass --model.")
    if flags.samples and flags.page:
        write_atomic(flags.page, page(findings, flags.path, flags.seed))
        print(f"Wrote {len(findings.sample)} questions to {flags.page}.")
    elif flags.samples:
        print("--page FILE.html shows some of the questions with their images.")
    return findings


def score_run(flags: argparse.Namespace) -> None:
    """Print for each completion its accuracy reward, the rule and words of its answer or why it has none."""
    counts = Counter[str]()
    for number, line in enumerate(islice(flags.path.read_text("utf-8").splitlines(), flags.limit)):
        try:
            row = dict(json.loads(line))
            text = completion_text(row["output"] if "output" in row else row.get("completion"))
            gold = resolve_solution(row.get("solution"), row.get("choices"))
        except (TypeError, ValueError) as error:  # a line is no object, or an answer cannot be read
            counts["no reward"] += 1
            print(to_one_line(f"{number}: no reward: {error}"))
            continue
        stated = stated_answer(text, gold.choices, is_open=gold.index is None)
        right, rule = is_right(text, gold), "no answer" if stated is None else stated.rule
        counts.update([rule, "right"] if right else [rule])
        words = "" if stated is None else f" {shorten(stated.part, 60)!r}"
        named = f"{LETTERS[gold.index]} ({gold.text})" if gold.choices and gold.index is not None else gold.text
        excluded = f" excluded, {stated.excluded}:" if stated and stated.excluded else ""
        print(to_one_line(f"{number}: {int(right)} {rule}{excluded}{words}, reference {shorten(named, 60)!r}"))
    rules = ", ".join(f"{name} {count}" for name, count in counts.most_common() if name != "right")
    print(f"{counts['right']} of {counts.total() - counts['right']} are right; {rules}.")
