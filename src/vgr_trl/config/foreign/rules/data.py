"""Questions: where they are, and what the user says."""

from pathlib import Path
from typing import Any

from vgr_trl.config.foreign.rules.values import Set, Values
from vgr_trl.errors import ConfigError

_TRAIN, _TEST = "data.train_files", "data.val_files"


def data(values: Values, set_: Set) -> None:
    """Files, folders and names on the hub, each with its split behind `@`; the columns as named, nothing else."""
    train, split = _source(values[_TRAIN], _TRAIN)
    if train is None:
        raise ConfigError(f"{_TRAIN} is missing: give files, a folder or a name on the hub, with @ and the split.")
    test, test_split = _source(values[_TEST], _TEST)
    if isinstance(train, list):
        files = f"train={'+'.join(train)}"
        if isinstance(test, list):
            files, test, test_split = f"{files},test={'+'.join(test)}", train, "test"
        set_("data_files", files, _TRAIN)
        split = "train"
    else:
        set_("dataset_path" if Path(train).is_dir() else "dataset_name", train, _TRAIN)
    set_("dataset_train_split", split, _TRAIN)
    if test is not None:
        set_("dataset_test_split", test_split, _TEST)
        if test != train:
            set_("test_dataset", test[0] if isinstance(test, list) else test, _TEST)
            if isinstance(test, list) and len(test) > 1:
                values.refuse(_TEST, "several files to evaluate on go with files to train on alone")
    set_("choices_key", "none")
    for part in ("image", "video"):
        key = f"data.{part}_key"
        if values[key] not in (f"{part}s", part):
            set_(f"{part}_key", values[key] or "none", key)
    if values["data.format_prompt"] is None:
        set_("system_prompt_file", "none", "data.format_prompt")
    else:
        set_("question_template_file", values["data.format_prompt"], "data.format_prompt")


def _source(given: Any, key: str) -> tuple[Any, str]:
    """A list of files, or a folder or hub name, and the split; None where nothing is given."""
    parts = [part for text in (given if isinstance(given, list | tuple) else [given or ""]) for part in text.split(",")]
    parts = [part.strip() for part in parts if part.strip()]
    if not parts:
        return None, ""
    pairs = [(name, split or "train") for name, _, split in (part.partition("@") for part in parts)]
    looks_like_files = [Path(name).is_file() or Path(name).suffix in _SUFFIXES for name, _ in pairs]
    if all(looks_like_files):
        return [name for name, _ in pairs], "train"
    if len(pairs) > 1:
        raise ConfigError(f"{key} is {given!r}: several parts must all be files.")
    return pairs[0]


_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
