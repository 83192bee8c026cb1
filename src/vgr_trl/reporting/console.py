"""Print records in colour; the colours of tokens and number formats that notebooks and Markdown share."""

import math
from typing import NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from vgr_trl.errors import printable
from vgr_trl.reporting.records import Completion, Numbers, Record


def print_record(record: Record, console: Console | None = None, prompt_length: int | None = None) -> None:
    """Print prompts, completions and rewards; tokens are coloured by weight, else by VGR, as in notebooks.

    Args:
        console: None: standard output.
        prompt_length: characters of a prompt to print; None: all.
    """
    for item in record.completions:
        tokens = color_tokens(item, "vgr" if item.weights is None else "weights")
        body = Text.assemble(
            (f"{printable(preview(item.prompt.strip(), prompt_length))}\n", "dim"),
            *((text, f"black on {colour}" if colour else "") for text, _, colour in tokens),
            (f"\n{VERDICTS[item.correct]}", "bold cyan" if item.correct else "bold magenta"),
            f" {format_rewards(item)}, advantage {format_number(item.advantage)}",
        )
        panel = Panel(body, title=f"step {record.step}, prompt {item.group}", title_align="left")
        (console or Console()).print(panel)


# Blue and orange: distinguishable for colour-blind readers, and light enough for black text.
LOW_COLOUR, MIDDLE_COLOUR, HIGH_COLOUR = (67, 147, 195), (247, 247, 247), (224, 130, 20)


class Quantity(NamedTuple):
    """A per-token quantity: title, meaning of values below and above the middle, and whether it is a ratio.

    The middle of a ratio is 1, on a logarithmic scale; otherwise it is 0.
    """

    title: str
    below: str
    above: str
    is_ratio: bool = False


QUANTITIES = {
    "vgr": Quantity("vision gain ratio", "looks more", "looks less", is_ratio=True),
    "weights": Quantity("weight", "less of the credit", "more of the credit", is_ratio=True),
    "dependency": Quantity("dependency on the image", "", "depends on the image"),
    "advantages": Quantity("advantage", "made less likely", "made more likely"),
    "entropies": Quantity("entropy", "", "uncertain"),
    "logps": Quantity("log-probability", "unlikely", ""),
}
VERDICTS = {True: "right", False: "wrong", None: ""}  # by `Completion.correct`


def format_number(value: float | None) -> str:
    """Format a number with four significant digits; a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.4g}"


def format_rewards(completion: Completion) -> str:
    """Return the name and value of every reward on one line."""
    return ", ".join(f"{printable(name)} {format_number(value)}" for name, value in completion.rewards.items())


def preview(text: str, length: int | None) -> str:
    """Return the first `length` characters and the number of omitted ones; None: all."""
    if length is None or len(text) <= length:
        return text
    return f"{text[:length]}\n[… {len(text) - length} more characters]"


def color_tokens(completion: Completion, name: str) -> list[tuple[str, str, str]]:
    """Return text, value and CSS colour of each token; no colour where the quantity was not measured.

    Args:
        completion: a completion of T tokens.
        name: a key of `QUANTITIES`.
    """
    values = completion.per_token()[name] or [None] * len(completion.tokens)
    colours = ["" if p is None else position_colour(p) for p in colour_positions(values, QUANTITIES[name].is_ratio)]
    return list(zip(map(printable, completion.tokens), map(format_number, values), colours, strict=True))


def colour_positions(values: Numbers, is_ratio: bool) -> Numbers:
    """Map values to colour positions in [-1, 1], with the middle at 0 and the same scale on both sides.

    The value farthest from the middle is at -1 or 1. None stays None.

    Args:
        values: finite numbers or None.
        is_ratio: the middle is 1 on a logarithmic scale, and values up to 0 are at -1; otherwise the middle is 0.
    """
    distances = list(values)
    if is_ratio:
        distances = [None if value is None else math.log(value) if value > 0 else -math.inf for value in values]
    farthest = max((abs(distance) for distance in distances if distance and math.isfinite(distance)), default=1.0)
    return [None if distance is None else max(-1.0, min(1.0, distance / farthest)) for distance in distances]


def position_colour(position: float) -> str:
    """Return the CSS colour of a position in [-1, 1]."""
    end = LOW_COLOUR if position < 0 else HIGH_COLOUR
    return "#" + "".join(f"{round(m + abs(position) * (e - m)):02x}" for m, e in zip(MIDDLE_COLOUR, end, strict=True))
