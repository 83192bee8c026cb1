"""Where results are kept: a JSON file that is complete after every measurement, and the page made of it."""

import json
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sharing_measure import ratio

KINDS = {"operations": ("operations", 1e9, "G"), "seconds": ("time", 1.0, "s"), "bytes": ("peak memory", 1e6, "MB")}
KEY = ("shape", "hidden", "layers", "device", "dtype", "attention", "prompts", "threads", "size", "place")


class Results:
    """Rows of a benchmark, found by what was measured; what is measured again is replaced, the rest stays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, key: dict[str, Any], **found: Any) -> None:
        """Add to the row `key` what was found, and write the file and its page."""
        rows = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        row = next((row for row in rows if all(row[name] == key[name] for name in KEY)), None)
        if row is None:
            row = {name: key[name] for name in KEY}
            rows.append(row)
        row.update(found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(page(rows))


def machine() -> dict[str, str]:
    """Processor and releases."""
    names = [line.split(":")[1].strip() for line in _cpu_information() if line.startswith("model name")]
    releases = {name: version(name) for name in ("torch", "transformers", "trl")}
    return {"processor": names[0] if names else platform.machine(), "python": platform.python_version(), **releases}


def _cpu_information() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown: one table per setting, shared over plain, with the values in brackets."""
    lines = ["# Shared prompts against plain passes", "", INTRODUCTION, "", _machine_line(), ""]
    for setting in dict.fromkeys(tuple(row[name] for name in KEY[:-2]) for row in rows):
        of_setting = [row for row in rows if tuple(row[name] for name in KEY[:-2]) == setting]
        lines += [f"## {_title(of_setting[0])}", "", *_table(of_setting), ""]
        if any("speed" in row or "largest" in row for row in of_setting):
            lines += [*_speeds(of_setting), ""]
    return "\n".join(lines).rstrip() + "\n"


INTRODUCTION = """\
P prompt tokens, V vision tokens among them (from a real tower), T completion tokens, G completions of each prompt.
Shared divided by plain: smaller is better; in brackets plain → shared. Times are medians; plain and shared passes
alternate in one process. Memory is that above libraries, model and batch, each pass in a process of its own. A step is
one optimizer step of `DAPOTrainer` against TRL's `GRPOTrainer`: image processing, generation, training."""


def _machine_line() -> str:
    return "Measured on " + ", ".join(f"{name} {value}" for name, value in machine().items()) + "."


def _title(row: dict[str, Any]) -> str:
    shape = f"hidden {row['hidden']}, {row['layers']} layers" if row["shape"] == "square" else row["shape"]
    threads = f", {row['threads']} threads" if row["device"] == "cpu" else ""
    where = f"{row['device']}{threads}, {row['prompts']} prompt(s)"
    return f"Qwen2.5-VL, {shape}, {row['dtype']}, {row['attention']}, {where}"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    titles = [title for title, _, _ in KINDS.values()]
    lines = ["| P, V, T, G | pass | " + " | ".join(titles) + " |", "|---|---|" + "---:|" * len(titles)]
    for row in rows:
        cells = [_cell(row.get(kind), scale, unit) for kind, (_, scale, unit) in KINDS.items()]
        lines.append(f"| {row['size'].replace(',', ', ')} | {row['place']} | " + " | ".join(cells) + " |")
    return lines


def _cell(pair: dict[str, Any] | None, scale: float, unit: str) -> str:
    if pair is None:
        return ""
    plain, shared = (_number(pair[kind], scale) for kind in ("plain", "shared"))
    return f"**{ratio(pair):.3f}** ({plain} → {shared} {unit})"


def _number(value: Any, scale: float) -> str:
    number = (statistics.median(value) if isinstance(value, list) else value) / scale
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def _speeds(rows: list[dict[str, Any]]) -> list[str]:
    titles = ["P, V, T, G", "pass", "", "images/s", "tokens/s", "of the peak", "largest G"]
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---:|---:|---:|---:|"]
    for row in rows:
        for kind in ("plain", "shared"):
            speed = row.get("speed", {}).get(kind, {})
            largest = row.get("largest", {}).get(kind, "")
            cells = [f"{speed[name]:,.{digits}f}" if name in speed else "" for name, digits in SPEEDS.items()]
            start = f"| {row['size'].replace(',', ', ')} | {row['place']} | {kind} | "
            lines.append(start + " | ".join([*cells, str(largest)]) + " |")
    return lines


SPEEDS = {"images per second": 2, "tokens per second": 0, "fraction of peak": 3}
