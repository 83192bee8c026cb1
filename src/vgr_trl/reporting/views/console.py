"""Recorded completions on a terminal, with coloured tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from vgr_trl.printable import printable
from vgr_trl.reporting.records.record import Completion, Record
from vgr_trl.reporting.views.markdown.elements import number, preview

# From little to much of the image, told apart by readers who do not see red and green alike (viridis, light half).
_SHADES = ("#8a8a8a", "#3b8ac4", "#21a5a5", "#5ec962", "#fde725")


def print_record(record: Record, console: Console | None = None, prompt_length: int | None = None) -> None:
    """Print the completions of a record; on what is no terminal the colours are left out.

    Args:
        console: where; None: standard output.
        prompt_length: characters of a prompt that are shown; None: all.
    """
    console = Console() if console is None else console
    for completion in record.completions:
        console.print(completion_panel(completion, record, prompt_length))


def completion_panel(completion: Completion, record: Record, prompt_length: int | None = None) -> Panel:
    """Return a panel with prompt, completion and rewards; tokens that weigh more, or look more, are brighter."""
    mark = {True: ("right", "bold cyan"), False: ("wrong", "bold magenta"), None: ("", "")}[completion.correct]
    body = Text()
    body.append(f"{printable(preview(completion.prompt.strip(), prompt_length))}\n", style="dim")
    for token, shade in zip(completion.tokens, token_shades(completion), strict=True):
        body.append(printable(token), style=shade)
    earned = ", ".join(f"{printable(name)} {number(value)}" for name, value in completion.rewards.items())
    body.append(f"\n{mark[0]} ", style=mark[1])
    body.append(f"{earned}, advantage {number(completion.advantage)}")
    return Panel(body, title=f"step {record.step}, prompt {completion.group}", title_align="left")


def token_shades(completion: Completion) -> list[str]:
    """Return a style for each token: by its weight, else by how little its VGR is, in fifths of the completion."""
    scores: Sequence[Any] | None = completion.weights
    if scores is None and completion.vgr is not None:
        scores = [None if value is None else -value for value in completion.vgr]
    if scores is None:
        return [""] * len(completion.tokens)
    known = sorted(score for score in scores if score is not None)
    return [_shade(score, known) for score in scores]


def _shade(score: float | None, known: Sequence[float]) -> str:
    if score is None:
        return ""
    return _SHADES[bisect_left(known, score) * len(_SHADES) // len(known)]
