"""How fast data sets are converted, and in how much memory; writes `results/data.md` and `data.json`.

python benchmarks/data.py --rows 10000 --repeats 3

Questions in the form of A-OKVQA with JPEG images of 640x480 pixels are drawn, and converted to Parquet as users do.

- Rate: in turns, a plain loop with two processes that decodes and resizes the same images, each process reading its
  half of them, with nothing handed over and nothing written; the same loop encoding the result as JPEG too; then
  `convert` with two decoding processes, once as it is by default (images of this size are checked and kept) and once
  reducing every image, which writes a new JPEG.
- Memory: all rows in one run, in a process of its own. The high-water mark is reset before the conversion; that of the
  decoding processes is read while they run, and all are added up.
"""

import argparse
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
from machine import describe_machine
from PIL import Image

RESULTS = Path(__file__).parent / "results"
SIZE = (640, 480)
REDUCED = (480, 360)
DISTINCT = 500
FILES = 4
WORKERS = 2
MEASURED = ("plain loop", "plain loop, encoding too", "convert", "convert, reducing")
MAP_HEADING = "## By `datasets.map`"  # the section that `data_map.py` writes, which stays


def main() -> None:
    """Draw the questions, measure memory, then rates; write what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="of the run whose memory is measured")
    parser.add_argument("--rate_rows", type=int, default=4_000, help="of each run whose time is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory_of", nargs=2, type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.memory_of:
        print(json.dumps(measure_memory(*flags.memory_of)))
        return
    found: dict[str, Any] = {
        "machine": describe_machine(1) | {"pillow": version("pillow"), "pyarrow": version("pyarrow")},
        "command": f"python benchmarks/data.py --rows {flags.rows} --rate_rows {flags.rate_rows} "
        f"--repeats {flags.repeats}",
        "rows": flags.rows,
        "rate_rows": flags.rate_rows,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found["bytes_per_image"] = draw(root / "all", flags.rows)
        command = [sys.executable, __file__, "--memory_of", str(root / "all"), str(root / "out")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found["memory"] = json.loads(done.stdout.splitlines()[-1])
        write(found)
        draw(root / "some", flags.rate_rows)
        found["rates"] = measure_rates(root / "some", root, flags.repeats, flags.rate_rows)
        write(found)


def draw(folder: Path, rows: int) -> int:
    """Write A-OKVQA's columns with images to Parquet files, and return the mean size of an image in bytes."""
    images = [photograph(seed) for seed in range(min(DISTINCT, rows))]
    folder.mkdir()
    for number in range(FILES):
        places = range(number * rows // FILES, (number + 1) * rows // FILES)
        columns = {
            "image": pyarrow.array(
                [{"bytes": images[place % len(images)], "path": None} for place in places],
                pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]),
            ),
            "question_id": [f"q{place}" for place in places],
            "question": [f"What is shown in picture {place}?" for place in places],
            "choices": [["a cat", "a dog", "a car", "a tree"]] * len(places),
            "correct_choice_idx": [place % 4 for place in places],
        }
        path = folder / f"train-{number:05d}-of-{FILES:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1000)
    return sum(map(len, images)) // len(images)


def photograph(seed: int) -> bytes:
    """A JPEG about as hard to decode as a photograph: structure at every scale, with a little noise."""
    random = numpy.random.default_rng(seed)
    pixels = numpy.zeros((SIZE[1], SIZE[0], 3))
    for step in (160, 40, 10):
        coarse = random.integers(0, 256, (SIZE[1] // step, SIZE[0] // step, 3), dtype=numpy.uint8)
        pixels += numpy.asarray(Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)) / 3.5
    pixels += random.normal(12, 4, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def convert(folder: Path, out: Path, *options: str) -> None:
    """Convert as a user does, without what it prints."""
    from vgr_trl.cli.data import main as data

    flags = ["--dataset_path", str(folder), "--output_dir", str(out), "--workers", str(WORKERS), *options]
    with open(os.devnull, "w") as nowhere:
        printed, sys.stdout = sys.stdout, nowhere
        try:
            data(["convert", "aokvqa", *flags])
        finally:
            sys.stdout = printed


def plain_loop(folder: Path, encoding: bool) -> None:
    """Decode and resize every image of a folder in two processes, and encode it if asked to."""
    context = multiprocessing.get_context("fork")  # the quickest start
    halves = [
        context.Process(target=decode_and_resize, args=(sorted(folder.iterdir())[part::WORKERS], encoding))
        for part in range(WORKERS)
    ]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    if any(half.exitcode for half in halves):
        raise RuntimeError("A process of the plain loop failed.")


def decode_and_resize(files: list[Path], encoding: bool) -> None:
    """Decode and resize the images of Parquet files, one after the other, and encode them as `convert` does."""
    for path in files:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(16, columns=["image"], use_threads=False):
            for image in batch.column(0).to_pylist():
                shown = Image.open(io.BytesIO(image["bytes"])).convert("RGB").resize(REDUCED, Image.Resampling.LANCZOS)
                if encoding:
                    shown.save(io.BytesIO(), "JPEG", quality=95, subsampling=0)


def measure_rates(folder: Path, root: Path, repeats: int, rows: int) -> dict[str, list[float]]:
    """Return rows per second of what is measured, in turns; every run starts its processes anew."""
    import vgr_trl.cli.data  # noqa: F401 (its import is not measured)

    rates: dict[str, list[float]] = {name: [] for name in MEASURED}
    for repeat in range(repeats):
        for name in MEASURED if repeat % 2 == 0 else MEASURED[::-1]:
            start = time.perf_counter()
            if name.startswith("plain loop"):
                plain_loop(folder, "encoding" in name)
            else:
                reducing = ("--max_pixels", str(REDUCED[0] * REDUCED[1])) if name != "convert" else ()
                convert(folder, root / f"{name}-{repeat}", *reducing)
            rates[name].append(rows / (time.perf_counter() - start))
    return rates


def measure_memory(folder: Path, out: Path) -> dict[str, float]:
    """Convert a folder in this process, and return the high-water marks in MiB, and the seconds it took."""
    import vgr_trl.cli.data  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")
    children: dict[int, int] = {}
    done = threading.Event()
    watch = threading.Thread(target=watch_children, args=(children, done))
    watch.start()
    start = time.perf_counter()
    convert(folder, out)
    seconds = time.perf_counter() - start
    done.set()
    watch.join()
    own = high_water(os.getpid())
    return {
        "main": own / 1024,
        "others": sum(children.values()) / 1024,
        "sum": (own + sum(children.values())) / 1024,
        "rows_written": sum(pyarrow.parquet.read_metadata(path).num_rows for path in out.glob("train-*")),
        "seconds": seconds,
    }


def watch_children(found: dict[int, int], done: threading.Event) -> None:
    """Keep the high-water mark of each process that this one started."""
    while not done.wait(0.1):
        for pid in children_of(os.getpid()):
            found[pid] = max(found.get(pid, 0), high_water(pid))


def children_of(pid: int) -> Iterator[int]:
    """The processes that the threads of a process started."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text().split())
        except OSError:
            continue


def high_water(pid: int) -> int:
    """The most memory that a process held, in KiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def write(found: dict[str, Any]) -> None:
    """Write the figures and the page."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "data.json").write_text(json.dumps(found, indent=1) + "\n")
    page = RESULTS / "data.md"
    _, heading, section = page.read_text().partition(MAP_HEADING) if page.exists() else ("", "", "")
    page.write_text(report(found) + ("\n" + heading + section if heading else ""))


def median_ratio(values: list[float], others: list[float]) -> float:
    """Return the median over the turns of the ratio within a turn."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def report(found: dict[str, Any]) -> str:
    """Return the page."""
    memory = found["memory"]
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = [
        "# Converting data sets",
        "",
        f"Questions in the form of A-OKVQA with drawn JPEG images of {SIZE[0]}x{SIZE[1]} pixels "
        f"({found['bytes_per_image'] / 1000:.0f} kB each), converted by `vgr-trl data convert` with {WORKERS} decoding "
        "processes.",
        "",
        f"Command: `{found['command']}`",
        "",
        f"{machine}.",
        "",
        f"**Memory**, {memory['rows_written']:,} rows in one run of {memory['seconds']:.0f} s: "
        f"{memory['sum']:.0f} MiB at most ({memory['main']:.0f} in the process that reads and writes, "
        f"{memory['others']:.0f} in the others; high-water marks added up, so pages that they share count more than "
        "once).",
    ]
    if "rates" in found:
        rates = found["rates"]
        lines += [
            "",
            f"**Rate**, {found['rate_rows']:,} rows a run, in turns. The plain loop decodes the same images and "
            f"resizes them to {REDUCED[0]}x{REDUCED[1]} in two processes, and keeps nothing. Its processes are "
            "forked, those of `convert` are started anew, and the time counts. By default `convert` decodes and checks "
            "images of this size and stores them as they are; reducing, it decodes, resizes and encodes them.",
            "",
            "| | rows per second, each run | median | of the plain loop | of the plain loop, encoding too |",
            "|---|---|---:|---:|---:|",
        ]
        for name, values in rates.items():
            shares = [median_ratio(values, rates[other]) for other in MEASURED[:2]]
            each = ", ".join(f"{value:.0f}" for value in values)
            lines.append(f"| {name} | {each} | {statistics.median(values):.0f} | {shares[0]:.2f} | {shares[1]:.2f} |")
        lines += ["", "Shares are medians over the turns."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
