"""easy-VQA with hints: questions about colour and shape that others made, answered by models that believe hints."""

import random
from pathlib import Path

from datasets import load_dataset
from easy_vqa_rows import balanced_rows, vocabulary

from methods.hints import copying
from methods.tasks import Families, Task
from vgr_trl.demo.dataset import Rows
from vgr_trl.demo.run import Questions

DATA = Path("../shared/data/easy_vqa")
VALIDATION_IMAGES = 500  # the last of the train images: they stop the warm start and do nothing else
SEEN: Families = {
    "colour": ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow"),
    "shape": ("circle", "rectangle", "triangle"),
}


def believing(seed: int) -> Questions:
    """Return questions about the colour and the shape of drawings, with hints that the start believes."""
    train, test = (
        list(load_dataset("parquet", data_files=str(DATA / f"{split}.parquet"), split="train"))
        for split in ("train", "test")
    )
    words = vocabulary(train)

    def asked(images: list, count: int, split: str) -> Rows:
        rows = balanced_rows(images, count, words=words, seed=seed, split=split)
        return [row for row in rows if row["family"] in SEEN]

    plain = Questions(
        train=asked(train[:-VALIDATION_IMAGES], 4500, "train"),
        validation=asked(train[-VALIDATION_IMAGES:], 192, "validation"),
        test=asked(test, 480, "test"),
    )
    return copying(plain, random.Random(f"easy-VQA {seed}"), 0.55, SEEN)


EASY_VQA = Task("easy-vqa-copied", 11, believing, caption_loss=0.12, families=SEEN, until="copied")
