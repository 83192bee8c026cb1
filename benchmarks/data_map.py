"""Conversion by `datasets.map` and sharded `to_parquet`, held against `convert`: a section of `results/data.md`.

python benchmarks/data_map.py --rows 1500 --repeats 3

Both read the same questions, encode images by the same function and publish files of 500 rows. By `map`, each file is
a call of `map` over its rows and a `to_parquet`, which is the most that a kill can leave of it. CPU seconds are of all
processes, their start counted, so that other work on the machine changes them little. Memory is what processes hold of
their own, sampled; files mapped into memory are not counted. Then each is killed (-9) when its second file is there.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import data
import pyarrow.parquet

ROWS_PER_FILE = 500
REDUCING = data.REDUCED[0] * data.REDUCED[1]
MEASURED = (*data.MEASURED, "map", "map, reducing")
HEADING = data.MAP_HEADING


def convert_by_map(folder: Path, out: Path, max_pixels: int | None) -> None:
    """What `convert` does, by `datasets`: rows that cannot be used get a reason and are filtered out."""
    import datasets

    from vgr_trl.data.build.pool import Encoding, encode_all
    from vgr_trl.data.build.sets import aokvqa
    from vgr_trl.data.build.write import schema
    from vgr_trl.data.rows.images.sizes import ImageLimits
    from vgr_trl.data.rows.questions import Origin
    from vgr_trl.files import publish, unfinished

    datasets.disable_progress_bars()
    limits = ImageLimits() if max_pixels is None else ImageLimits(max_pixels=max_pixels)
    encoding = Encoding(limits=limits)
    out.mkdir(exist_ok=True)
    rows = datasets.load_dataset(
        "parquet",
        data_files=[str(path) for path in sorted(folder.iterdir())],
        split="train",
        cache_dir=str(out / "cache"),
    )
    features = datasets.Features.from_arrow_schema(schema(False))
    features = datasets.Features(features | {"image": datasets.Image(decode=False), "reason": datasets.Value("string")})

    def encoded(row: dict[str, Any], place: int) -> dict[str, Any]:
        (question,) = aokvqa._questions(Origin(str(folder), place), row)
        images = encode_all(question.images, encoding)
        named = {name: getattr(question, name) for name in ("id", "source", "problem", "solution", "choices")}
        if isinstance(images, str):
            return {**named, "image": None, "reason": images}
        return {**named, "image": {"bytes": images[0].data, "path": None}, "reason": None}

    for part, start in enumerate(range(0, len(rows), ROWS_PER_FILE)):
        path = out / f"train-{part:05d}.parquet"
        if path.exists():
            continue
        chosen = rows.select(range(start, min(start + ROWS_PER_FILE, len(rows))))
        made = chosen.map(
            encoded,
            with_indices=True,
            num_proc=data.WORKERS,
            remove_columns=rows.column_names,
            features=features,
            writer_batch_size=100,
        )
        kept = made.filter(lambda reason: reason is None, input_columns="reason").remove_columns("reason")
        kept.cast_column("image", datasets.Image()).to_parquet(unfinished(path))
        publish(path)


def work(name: str, folder: Path, out: Path) -> None:
    """Do what is measured."""
    max_pixels = REDUCING if "reducing" in name else None
    if name.startswith("plain loop"):
        data.plain_loop(folder, "encoding" in name)
    elif name.startswith("map"):
        convert_by_map(folder, out, max_pixels)
    else:
        options = () if max_pixels is None else ("--max_pixels", str(max_pixels))
        data.convert(folder, out, "--rows_per_file", str(ROWS_PER_FILE), *options)


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run_one(name: str, folder: Path, out: Path) -> None:
    """Work in this process, what is imported being so before, and print what it cost."""
    import datasets  # noqa: F401

    import vgr_trl.cli.data.convert  # noqa: F401

    before = cpu_seconds()
    work(name, folder, out)
    print(json.dumps({"cpu": cpu_seconds() - before}))


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    return [pid, *(one for child in data.children_of(pid) for one in family(child))]


def own_memory(pid: int) -> int:
    """MiB that a process holds of its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) // 1024


def measure(name: str, folder: Path, out: Path, kill: bool = False) -> dict[str, Any]:
    """Run in a process of its own; return CPU seconds, memory, disk, rows written; of a killed run, what is left."""
    command = [sys.executable, __file__, "--one", name, str(folder), str(out)]
    environment = os.environ | {"HF_DATASETS_CACHE": str(out / "cache"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    memory, members = 0, [process.pid]
    while process.poll() is None:
        try:
            members = family(process.pid)
        except OSError:
            continue
        memory = max(memory, sum(map(own_memory, members)))
        if kill and len(list(out.glob("train-*.parquet"))) >= 2:
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(3)
            left = [pid for pid in members[1:] if own_memory(pid) > 0]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return {"processes_left": len(left)}
        time.sleep(0.05)
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{name} failed")
    written = [pyarrow.parquet.read_metadata(path).num_rows for path in out.glob("train-*.parquet")]
    sizes = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    cost = json.loads(printed.splitlines()[-1])
    return cost | {"memory": memory, "rows": sum(written), "disk": sum(sizes) / 2**20}


def main() -> None:
    """Measure in turns, then kill and continue; write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        run_one(flags.one[0], Path(flags.one[1]), Path(flags.one[2]))
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MEASURED}
    killed: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as root:
        source, out = Path(root) / "source", Path(root) / "out"
        data.draw(source, flags.rows)
        for name in ("convert", "map"):
            killed[name] = measure(name, source, out, kill=True)
            killed[name] |= measure(name, source, out)
            shutil.rmtree(out)
        for repeat in range(flags.repeats):
            for name in MEASURED if repeat % 2 == 0 else MEASURED[::-1]:
                runs[name].append(measure(name, source, out))
                shutil.rmtree(out, ignore_errors=True)
            page = data.RESULTS / "data.md"
            before = page.read_text().partition(HEADING)[0].rstrip()
            page.write_text(before + "\n\n" + section(flags, runs, killed))


def section(flags: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], killed: dict[str, dict[str, Any]]) -> str:
    """Return the section of the page."""
    lines = [
        HEADING,
        "",
        f"Command: `python benchmarks/data_map.py --rows {flags.rows} --repeats {flags.repeats}`. Both publish files "
        f"of {ROWS_PER_FILE:,} rows; by `map`, each is a `map` over its rows with two processes and a `to_parquet`. "
        "CPU seconds of all processes, on a machine that others use too.",
        "",
        "| | CPU seconds, each run | rows per CPU second | of the plain loop | own memory, MiB | disk, MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    rates = {name: statistics.median(flags.rows / run["cpu"] for run in of) for name, of in runs.items()}
    for name, of in runs.items():
        each = ", ".join(f"{run['cpu']:.1f}" for run in of)
        memory, disk = (max(run[what] for run in of) for what in ("memory", "disk"))
        share = rates[name] / rates["plain loop"]
        lines.append(f"| {name} | {each} | {rates[name]:.0f} | {share:.2f} | {memory:.0f} | {disk:.0f} |")
    lines += ["", "Killed (-9) when two files were there, and called again:", ""]
    for name, found in killed.items():
        whole = statistics.median(run["cpu"] for run in runs[name])
        lines.append(
            f"- {name}: {found['rows']:,} rows in the end; the second call took {found['cpu']:.1f} CPU seconds of "
            f"{whole:.1f} for all; {found['processes_left']} processes were still there 3 s after the kill."
        )
    memory, disk = (
        [max(run[what] for run in runs[name]) for name in ("map", "convert")] for what in ("memory", "disk")
    )
    lines += [
        "",
        "`convert` keeps its own processes and writer: by `map` rows are as fast and a kill costs as much, but it "
        f"holds {memory[0] / memory[1]:.1f} times the memory and {disk[0] / disk[1]:.1f} times the disk, "
        "for the source and every result are Arrow files first; and a stream would have to be written down before.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
