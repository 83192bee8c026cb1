"""Prompts and completions in the form that tables of completions can hold and show."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vgr_trl.printable import printable

TABLES = "completions_[0-9]*.parquet"


def as_text(messages: Any) -> Any:
    """Return a conversation as one text, with `<image>` for an image, and characters that do not show as their numbers.

    A column of a table has one type, and trackers show texts. The messages of a prompt with images are lists of parts,
    one of which has no text: wandb 0.31 refuses them, trackio 0.43 shows `[object Object]`, and Parquet cannot hold
    them beside prompts without images, whose content is a text (seen with TRL 1.16).

    TRL prints the table too, and passes on what clears a terminal, renames its window or reorders a line.

    Args:
        messages: with a `role` and a `content` that is a text or a list of parts; a text is a text, and anything else
            is returned as it is.

    Returns:
        The content of a single message; of several, each behind its role.
    """
    if isinstance(messages, str):
        return printable(messages)
    if not isinstance(messages, list):
        return messages
    if len(messages) == 1:
        return printable(_content(messages[0]))
    return printable("\n\n".join(f"{message['role']}: {_content(message)}" for message in messages))


@contextmanager
def in_texts(columns: dict[str, Any], names: Iterable[str] = ("prompt", "completion")) -> Iterator[None]:
    """In this block, the columns of these names hold the texts of their conversations; afterwards what they held."""
    kept = {name: columns[name] for name in names}
    columns.update({name: [as_text(messages) for messages in column] for name, column in kept.items()})
    try:
        yield
    finally:
        columns.update(kept)


@contextmanager
def beside_training(output_dir: str | None, step: int, evaluates: bool) -> Iterator[None]:
    """In this block TRL writes its table of completions; that of an evaluation then gets a name of its own, `…_eval`.

    TRL 1.16 names both by the step, so that an evaluation replaced the table of training of its step.

    Args:
        evaluates: whether it is one of an evaluation, which this process writes.
    """
    file = _folder(output_dir) / f"completions_{step:05d}.parquet"
    kept = file.with_suffix(".training")
    if evaluates and file.exists():
        file.replace(kept)
    try:
        yield
    finally:
        if evaluates and file.exists():
            file.replace(file.with_name(f"{file.stem}_eval.parquet"))
        if evaluates and kept.exists():
            kept.replace(file)


def remove_oldest_tables(output_dir: str | None, max_bytes: float) -> None:
    """Remove the oldest tables of completions, except the first, until all have at most `max_bytes` together."""
    sizes = {path: path.stat().st_size for path in sorted(_folder(output_dir).glob(TABLES), key=_step)}
    total = sum(sizes.values())
    for path in list(sizes)[1:-1]:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= sizes[path]


def _folder(output_dir: str | None) -> Path:
    return Path(output_dir or "trainer_output", "completions")


def _step(path: Path) -> tuple[int, str]:
    return int(path.stem.split("_")[1]), path.name


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = "".join(map(_part, content)) if isinstance(content, list) else str(content or "")
    return text + (f" {message['tool_calls']}" if message.get("tool_calls") else "")


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if part.get("type") == "text" else f"<{part.get('type')}>"
