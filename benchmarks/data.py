"""How long a start over many photographs takes, and in how much memory; writes `results/data.md`.

python benchmarks/data.py --rows 20000 --peer_rows 200 --easyr1 CHECKOUT

Questions with JPEG images of 1024x768 pixels are drawn and written as Parquet, the images inside. Every measurement is
a process of its own, imports are not counted, and the cache of `datasets` is empty where it says "first".

- Start: rows read and checked, and prompts over `max_prompt_length` left out, as `vgr-trl train` does.
- `--dry_run`: the whole command with the embedded model, less its imports.
- Peers, on fewer rows: the data section of TRL's example `grpo_vlm.py`, and EasyR1's `RLHFDataset` with
  `filter_overlong_prompts`, of a checkout of EasyR1.
- Memory: the most that the process and those it starts hold beyond what it held after its imports, pages that they
  share counted once (`Pss_Anon`).
- Waiting: how long a training process waits for rows in each rollout of 8 prompts, 8 completions, 8 micro-batches.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
from machine import RESULTS, describe_machine
from PIL import Image

SIZE, DISTINCT, ROWS_PER_FILE, LIMIT = (1024, 768), 200, 2000, 2048
STREAMED = 5_000_000
BUSY = {"generation": 3.0, "micro-batch": 0.2}  # seconds in which a device computes


def main() -> None:
    """Draw the questions, measure each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--peer_rows", type=int, default=200)
    parser.add_argument("--easyr1", type=Path, help="folder of a checkout of EasyR1")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        print(json.dumps(PARTS[flags.part](flags)))
        return
    found: dict[str, Any] = {"rows": flags.rows, "peer_rows": flags.peer_rows}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found["bytes"] = draw(root / "data", flags.rows)
        draw(root / "few", flags.peer_rows)
        run(root, "model")
        for part in ("first start", "second start", "dry run", "waiting, 0 workers", "waiting, 1 worker", "stream"):
            found[part] = run(root, part)
        shutil.rmtree(root / "cache" / "vgr_trl", ignore_errors=True)
        found["inspect"], found["inspect again"] = run(root, "inspect"), run(root, "inspect")
        for part in ("few", "TRL", *(["EasyR1"] if flags.easyr1 else [])):
            found[part] = run(root, part, "--easyr1", str(flags.easyr1))
    (RESULTS / "data.md").write_text(report(found))


def run(root: Path, part: str, *more: str) -> dict[str, Any]:
    """Measure a part in a process of its own."""
    environment = {**os.environ, "HF_DATASETS_CACHE": str(root / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--part", part, "--folder", str(root), *more]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(part, found, flush=True)
    return found


def draw(folder: Path, rows: int) -> int:
    """Write questions with images, no two files of which are equal; return the mean size of an image in bytes."""
    images = [photograph(seed) for seed in range(min(DISTINCT, rows))]
    folder.mkdir()
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        places = range(start, min(start + ROWS_PER_FILE, rows))
        shown = [{"bytes": numbered(images[place % len(images)], place), "path": None} for place in places]
        columns = {
            "id": [f"q{place}" for place in places],
            "problem": [f"What is shown in picture {place}?" for place in places],
            "choices": [["a cat", "a dog", "a car", "a tree"]] * len(places),
            "solution": ["ABCD"[place % 4] for place in places],
            "image": pyarrow.array(shown, image),
        }
        path = folder / f"train-{number:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100, compression="none")
    return sum(map(len, images)) // len(images)


def photograph(seed: int) -> bytes:
    """A JPEG about as hard to decode as a photograph: structure at every scale, with a little noise."""
    random = numpy.random.default_rng(seed)
    pixels = numpy.zeros((SIZE[1], SIZE[0], 3), dtype=numpy.float32)
    for step in (256, 64, 16):
        coarse = random.integers(0, 256, (SIZE[1] // step, SIZE[0] // step, 3), dtype=numpy.uint8)
        pixels += numpy.asarray(Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)) / 3.5
    pixels += random.normal(12, 4, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def numbered(data: bytes, number: int) -> bytes:
    """The same JPEG with a comment behind its first marker."""
    return data[:2] + b"\xff\xfe\x00\x0a" + f"{number:08d}".encode() + data[2:]


# Parts, each in a process of its own


def make_model(flags: argparse.Namespace) -> None:
    """Write the embedded model."""
    from vgr_trl.demo.write_folder import main as write_folder

    with open(os.devnull, "w") as nowhere:
        printed, sys.stdout = sys.stdout, nowhere
        write_folder([str(flags.folder / "tiny")])
        sys.stdout = printed


def start(flags: argparse.Namespace, name: str = "data") -> dict[str, float]:
    """Read, check and measure all rows as `vgr-trl train` does."""
    import vgr_trl.cli.train  # noqa: F401 (its import is not counted)
    from vgr_trl.cli.arguments import DataArguments, load_processor, load_rows
    from vgr_trl.data.checked_rows import drop_long_prompts
    from vgr_trl.data.prompts import PromptLengths

    processor = load_processor(str(flags.folder / "tiny" / "model"), None, False)

    def work() -> None:
        given = DataArguments(dataset_path=str(flags.folder / name))
        rows, _ = load_rows(given, "train", needs_solution=True, limit=None, processor=lambda: processor)
        drop_long_prompts(rows, "train", PromptLengths(processor), LIMIT, on_dropped=print)

    return measured(work)


def dry_run(flags: argparse.Namespace) -> dict[str, float]:
    """Try a training; its imports are made before."""
    from vgr_trl.cli.train import main as train

    with suppress(ImportError):
        import deepspeed  # noqa: F401 (accelerate imports it where it is installed)

    options = f"--model_name_or_path {flags.folder}/tiny/model --dataset_path {flags.folder}/data --dry_run"
    options += f" --max_prompt_length {LIMIT} --output_dir {flags.folder}/out --num_generations 8"
    options += " --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --max_completion_length 32"
    options += " --use_cpu true --bf16 false --gradient_checkpointing false --max_steps 100"

    def work() -> None:
        with open(os.devnull, "w") as nowhere:
            printed, sys.stdout = sys.stdout, nowhere
            train(options.split())
            sys.stdout = printed

    return measured(work)


def inspect(flags: argparse.Namespace) -> dict[str, float]:
    """Inspect the set, tokens counted, with its page."""
    from vgr_trl.cli.data import main as data

    os.chdir(flags.folder)
    options = ["inspect", "data", "--model", "tiny/model", "--max_prompt_length", str(LIMIT)]

    def work() -> None:
        with open(os.devnull, "w") as nowhere:
            printed, sys.stdout = sys.stdout, nowhere
            data(options)
            sys.stdout = printed

    return measured(work)


def stream(flags: argparse.Namespace) -> dict[str, float]:
    """Take the first row of a stream of JSONL with five million rows."""
    from vgr_trl.cli.arguments import DataArguments, load_rows

    Image.new("RGB", SIZE).save(flags.folder / "one.jpg")
    with (flags.folder / "rows.jsonl").open("w") as file:
        for place in range(STREAMED):
            file.write(f'{{"problem": "What is in {place}?", "solution": "x", "image": "one.jpg"}}\n')
    given = DataArguments(data_files=str(flags.folder / "rows.jsonl"), dataset_streaming=True)
    return measured(lambda: next(iter(load_rows(given, "train", needs_solution=True, limit=None)[0])))


def waiting(flags: argparse.Namespace, workers: int) -> dict[str, float]:
    """Return the seconds that a process waits for rows in each of three rollouts, after the first."""
    from torch.utils.data import DataLoader

    from vgr_trl.cli.arguments import DataArguments, load_rows
    from vgr_trl.data.checked_rows import ReadOnce

    rows, _ = load_rows(
        DataArguments(dataset_path=str(flags.folder / "data")), "train", needs_solution=True, limit=None
    )
    batches = [[prompt for prompt in range(rollout * 8, rollout * 8 + 8) for _ in range(8)]
               for rollout in range(4) for _ in range(8)]  # fmt: skip
    read: Any = ReadOnce(rows)
    loader: Any = DataLoader(read, batch_sampler=batches, num_workers=workers, collate_fn=list)
    waited, before = 0.0, time.perf_counter()
    for number, _ in enumerate(loader):
        waited += (time.perf_counter() - before) * (number >= 8)
        time.sleep(BUSY["generation"] * (number % 8 == 0) + BUSY["micro-batch"])
        before = time.perf_counter()
    return {"seconds": waited / 3}


def of_trl(flags: argparse.Namespace) -> dict[str, float]:
    """The data section of TRL's `examples/scripts/grpo_vlm.py`, its limit on sizes lifted."""
    from datasets import Image as ImageFeature
    from datasets import load_dataset

    def work() -> None:
        rows = load_dataset("parquet", data_files=str(flags.folder / "few" / "*.parquet"), split="train")
        rows = rows.cast_column("image", ImageFeature())
        rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
        rows = rows.filter(lambda row: max(row["image"].size) < 2048)
        rows.map(lambda row: {**row, "image": row["image"].convert("RGB")})

    return measured(work)


def of_easyr1(flags: argparse.Namespace) -> dict[str, float]:
    """EasyR1's data set with `filter_overlong_prompts`, with as many workers as there are cores."""
    # What the file imports for videos and for training is not used here.
    for name in ("qwen_vl_utils", "qwen_vl_utils.vision_process", "easyr1", "easyr1.torch_functional"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["qwen_vl_utils.vision_process"])["fetch_video"] = None
    sys.modules["easyr1"].__path__ = [str(flags.easyr1 / "verl" / "utils")]
    dataset = import_module("easyr1.dataset")

    from vgr_trl.cli.arguments import load_processor

    processor = load_processor(str(flags.folder / "tiny" / "model"), None, False)
    rows = pyarrow.concat_tables(map(pyarrow.parquet.read_table, sorted((flags.folder / "few").iterdir())))
    of_theirs = flags.folder / "easyr1"
    of_theirs.mkdir()
    images = [[image] for image in rows["image"].to_pylist()]
    problems = [f"<image>{problem}" for problem in rows["problem"].to_pylist()]
    table = pyarrow.table({"problem": problems, "answer": rows["solution"], "images": images})
    pyarrow.parquet.write_table(table, of_theirs / "train.parquet")
    keys = {"prompt_key": "problem", "answer_key": "answer", "max_prompt_length": LIMIT}
    workers = {"filter_overlong_prompts_workers": os.cpu_count()}
    return measured(lambda: dataset.RLHFDataset(str(of_theirs), processor.tokenizer, processor, **keys, **workers))


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "model": make_model,
    "first start": start,
    "second start": start,
    "dry run": dry_run,
    "inspect": inspect,
    "stream": stream,
    "waiting, 0 workers": lambda flags: waiting(flags, 0),
    "waiting, 1 worker": lambda flags: waiting(flags, 1),
    "few": lambda flags: start(flags, "few"),
    "TRL": of_trl,
    "EasyR1": of_easyr1,
}


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds that `work` takes, and by how many MiB memory grows."""
    before, most, done = held(os.getpid()), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            most[0] = max(most[0], sum(map(held, tree(os.getpid()))))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    return {"seconds": seconds, "MiB": max(0, most[0] - before) / 1024}


def tree(pid: int) -> Iterator[int]:
    """Yield a process and those that it started."""
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))
    except OSError:
        return


def held(pid: int) -> int:
    """Return the memory of a process in KiB, pages that others share in parts; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss_Anon")), 0)


def report(found: dict[str, Any]) -> str:
    """Return the page."""
    rows, few = found["rows"], found["peer_rows"]
    times = rows / few
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(1).items())

    def line(what: str, part: str, goal: str, memory: bool = True) -> str:
        seconds, grown = found[part]["seconds"], found[part].get("MiB")
        return f"| {what} | {seconds:.1f} | {goal} | {f'{grown:,.0f}' if memory else ''} |"

    lines = [
        "# Starting over many photographs",
        "",
        f"{rows:,} questions with drawn JPEG images of {SIZE[0]}x{SIZE[1]} pixels ({found['bytes'] / 1000:.0f} kB "
        f"each) in Parquet, with `max_prompt_length` {LIMIT}. Imports are not counted. Memory is what the process and "
        "those it starts hold beyond what it held after its imports.",
        "",
        f"Command: `python benchmarks/data.py --rows {rows} --peer_rows {few} --easyr1 CHECKOUT`",
        "",
        f"{machine}.",
        "",
        "| | seconds | goal | MiB |",
        "|---|---:|---:|---:|",
        line("first start", "first start", "60"),
        line("second start", "second start", "5"),
        line("`--dry_run` after it, with a step of the embedded model", "dry run", "10"),
        line("`data inspect`, tokens counted, the first time", "inspect", "10"),
        line("`data inspect` again", "inspect again", "10"),
        line(f"first row of a stream of {STREAMED:,} rows of JSONL", "stream", "at once"),
        "",
        "## Beside others",
        f"On {few:,} of the rows, all first. The last column is {times:.0f} times the first for the peers, whose work "
        "grows with the rows, and measured for this library.",
        "",
        f"| | seconds | would be for {rows:,} |",
        "|---|---:|---:|",
    ]
    peers = {
        "few": "this library: rows checked, lengths counted",
        "TRL": "TRL's `grpo_vlm.py`: images decoded, and written again as PNG; lengths not counted",
        "EasyR1": "EasyR1's `filter_overlong_prompts`: images decoded and processed, lengths counted",
    }
    whole = {"few": found["first start"]["seconds"]}  # measured
    lines += [f"| {text} | {found[part]['seconds']:.1f} | {whole.get(part, found[part]['seconds'] * times):,.0f} |"
              for part, text in peers.items() if part in found]  # fmt: skip
    none, one = (found[part]["seconds"] for part in ("waiting, 0 workers", "waiting, 1 worker"))
    lines += [
        "",
        "## Waiting for images in training",
        "A rollout of 8 prompts with 8 completions each in 8 micro-batches; the device computes for "
        f"{BUSY['generation']:g} s, and {BUSY['micro-batch']:g} s per micro-batch. Per rollout the training process "
        f"waits {1000 * none:.0f} ms with `dataloader_num_workers` 0, and {1000 * one:.0f} ms with 1.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
