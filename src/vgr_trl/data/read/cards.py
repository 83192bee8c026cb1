"""What the card of a local data set says of its files: `datasets` would read them wherever they are."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.data.rows.images.places import path_within
from vgr_trl.errors import DataError

HEAD = re.compile(r"\s*---\n+(.*?)\n+---(?:\n|$)", re.DOTALL)
CARDS = ("README.md", ".huggingface.yaml")


def names_files(folder: Path) -> bool:
    """Whether a card in `folder` says which files its rows are in."""
    return any(True for name in CARDS for _ in _files(_said(folder / name)))


def refuse_files_elsewhere(folder: Path) -> None:
    """Raise `DataError` if a card in `folder` names files outside of it, or addresses."""
    for name in CARDS:
        for file in _files(_said(folder / name)):
            try:
                if "://" in file:
                    raise DataError(f"{file} is an address")
                path_within(folder.absolute(), file)
            except DataError as error:
                raise DataError(
                    f"{name} of {folder} says that its rows are in {file[:200]}, which is not in that folder, and is "
                    "not read: take that out, or give the files by data_files."
                ) from error


def _said(card: Path) -> Any:
    """What stands between the first two lines `---` of a card, or in all of a YAML file."""
    try:
        text = card.read_text(encoding="utf-8")
        if card.suffix == ".md":
            head = HEAD.match(text)
            text = head[1] if head else ""
        return yaml.safe_load(text)
    except (OSError, UnicodeError, yaml.YAMLError):  # `datasets` has its own words for these
        return None


def _files(said: Any) -> Iterator[str]:
    configs = said.get("configs") if isinstance(said, dict) else None
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict):
            yield from _texts([config.get("data_files"), config.get("data_dir")])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        yield from _texts([one for name, one in value.items() if name != "split"])
