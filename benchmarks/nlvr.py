"""Can a model of the bench's size learn NLVR from its answers, so that reinforcement had something to choose between?

    PYTHONPATH=src:benchmarks python benchmarks/nlvr.py --data ../shared/data/nlvr

Supervised, on train and dev together (1,989 sentences, boxes in all six orders, of which the truth does not depend),
measured on test; writes `results/nlvr.md`.
"""

import argparse
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from demo_seeds import describe_machine
from PIL import Image

from vgr_trl.demo.dataset import Rows, words_of
from vgr_trl.demo.options import Options
from vgr_trl.demo.run import set_up_process
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.demo.warm_start import warm_start
from vgr_trl.evaluation import evaluate

FILE = Path(os.environ.get("RESULTS", Path(__file__).parent / "results")) / "nlvr.md"
BOXES, SIZE = (0, 150, 300), 100  # left edges and width, in pixels
ORDERS = tuple(itertools.permutations(range(3)))
HEADS = ("steps", "learned", "test", "test, new sentences", "test, blanked")


class InAllOrders(Sequence[dict[str, Any]]):
    """Rows with the boxes of their images in each of the six orders, drawn when asked for."""

    def __init__(self, rows: Rows) -> None:
        """Keep the rows."""
        self.rows = rows

    def __len__(self) -> int:
        """Return six times the rows."""
        return len(self.rows) * len(ORDERS)

    def __getitem__(self, index: Any) -> Any:
        """Return a row with its boxes in one order."""
        row = self.rows[index // len(ORDERS)]
        return row | {"image": reordered(row["image"], ORDERS[index % len(ORDERS)])}


def reordered(image: Image.Image, order: Sequence[int]) -> Image.Image:
    """Return an image whose boxes, from left to right, are those of `order`."""
    drawn = image.copy()
    for place, box in zip(BOXES, order, strict=True):
        drawn.paste(image.crop((BOXES[box], 0, BOXES[box] + SIZE, SIZE)), (place, 0))
    return drawn


def main() -> None:
    """Learn, measure on the way, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/nlvr"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--measure_every", type=int, default=500)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    set_up_process(Options(seed=flags.seed))
    learned, test = read(flags.data, ("train", "dev")), read(flags.data, ("test",))
    model, processor = build_tiny_vlm(words_of(learned), seed=flags.seed)
    known = {row["problem"] for row in learned}
    new = [row for row in test if row["problem"] not in known]
    points = list[list[float]]()

    def accuracies() -> float:
        def of(rows: Rows, **options: Any) -> float:
            settings = {"num_samples": 0, "max_completion_length": 8, "batch_size": 64, "progress": False}
            return evaluate(model, processor, rows, system_prompt=None, **settings | options).accuracy

        points.append([of(learned[:990]), of(test), of(new), of(test, blank_images=True)])
        print(points[-1], flush=True)
        return 0.0

    began = time.process_time()
    steps = warm_start(
        model,
        processor,
        InAllOrders(learned),
        accuracy=accuracies,
        target_accuracy=1.0,
        measure_every=flags.measure_every,
        max_steps=flags.steps,
        learning_rate=flags.learning_rate,
        seed=flags.seed,
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    rows = [[step, *point] for (step, _), point in zip(steps, points, strict=True)]
    FILE.write_text(report(rows, test, new, size, time.process_time() - began, flags))


def read(data: Path, splits: Sequence[str]) -> Rows:
    """Return the sentences of splits as questions with the answers true and false."""
    return [
        {
            "id": row["identifier"],
            "problem": row["sentence"].strip().lower(),
            "image": row["image"].convert("RGB"),
            "thought": "",
            "solution": row["label"],
        }
        for split in splits
        for row in load_dataset("parquet", data_files=str(data / f"{split}.parquet"), split="train")
    ]


def report(
    rows: Sequence[Sequence[float]], test: Rows, new: Rows, size: int, seconds: float, flags: argparse.Namespace
) -> str:
    """Return the table."""
    majorities = (Counter(row["solution"] for row in some).most_common(1)[0][1] / len(some) for some in (test, new))
    lines = [
        "# NLVR by a model of the bench's size",
        "",
        f"Command: `PYTHONPATH=src:benchmarks python benchmarks/nlvr.py --data ../shared/data/nlvr "
        f"--steps {flags.steps} --learning_rate {flags.learning_rate:g} --seed {flags.seed}`; {seconds:.0f} CPU "
        "seconds.",
        "",
        ", ".join(f"{name} {value}" for name, value in describe_machine(torch.get_num_threads()).items()) + ".",
        "",
        "Data: NLVR, CC-BY-4.0, Suhr, Lewis, Yeh, Artzi, ACL 2017 (lil-lab/nlvr).",
        "",
        f"{size:,} parameters, from nothing; supervised answers to the sentences of train and dev, 32 a step, with "
        f"the three boxes in any order. Greedy accuracy: on 990 of the sentences learned from, on all {len(test)} of "
        f"test, on the {len(new)} of them whose sentence was not learned from, on test with images blanked. The "
        "commonest answer is right in {:.3f} of test and {:.3f} of its new sentences.".format(*majorities),
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---:" * len(HEADS) + "|",
        *("| " + " | ".join([f"{row[0]:.0f}", *(f"{value:.3f}" for value in row[1:])]) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
