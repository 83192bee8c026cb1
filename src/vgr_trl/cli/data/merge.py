"""`vgr-trl data merge SET SET …`: several converted sets to one, split into train and test."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vgr_trl.cli.data.convert import add_output_flags, limits_of, refuse_within, show
from vgr_trl.cli.flags.advice import one_sentence
from vgr_trl.data.build.convert import Output
from vgr_trl.data.build.merge import MergeOptions, merge
from vgr_trl.data.build.plot import figures_for
from vgr_trl.data.build.pool import Encoding
from vgr_trl.data.read.sources import Source, splits_in
from vgr_trl.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, print what the result consists of, and return 0."""
    flags = parser().parse_args(argv)
    with one_sentence():
        run(flags)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    made = argparse.ArgumentParser(prog="vgr-trl data merge", description=__doc__, allow_abbrev=False)
    made.add_argument("sets", nargs="+", help="folders that `convert` wrote, FOLDER:SPLIT for one split, or files")
    made.add_argument("--weights", nargs="+", type=float, help="one per set: their proportions (default: every row)")
    made.add_argument("--test_share", type=float, default=0.1, help="of the rows; 0: no split (default 0.1)")
    made.add_argument("--seed", type=int, default=0, help="of split, weights and order of options (default 0)")
    made.add_argument("--shuffle_choices", action="store_true", help="put options in another order, letters balanced")
    add_output_flags(made)
    return made


def run(flags: argparse.Namespace) -> None:
    """Merge as the flags say, and print and write down what the result consists of."""
    if flags.plot:
        figures_for(flags.plot)
    sources = [set_source(text) for text in flags.sets]
    for source in sources:
        refuse_within(flags.output_dir, source)
    options = MergeOptions(
        weights=None if flags.weights is None else tuple(flags.weights),
        test_share=flags.test_share,
        seed=flags.seed,
        shuffle_choices=flags.shuffle_choices,
    )
    encoding = Encoding(limits=limits_of(flags))
    output = Output(
        flags.output_dir,
        kind=flags.output_format,
        rows_per_file=flags.rows_per_file,
        workers=flags.workers,
        encoding=encoding,
    )
    identity = {
        "sets": [source.identity() for source in sources],
        **asdict(options),
        **asdict(encoding.limits),
        **{name: getattr(output, name) for name in ("kind", "rows_per_file")},
    }
    plan = merge(sources, output, options, identity)
    show(flags.output_dir, flags.plot)
    if plan.surplus:
        print(f"{plan.surplus:,} rows more could be used, but are left out for the weights.")


def set_source(text: str) -> Source:
    """Return the set that `FOLDER`, `FOLDER:SPLIT` or a file names.

    Raises:
        ConfigError: there is none, or the folder has several splits and none is named.
    """
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
