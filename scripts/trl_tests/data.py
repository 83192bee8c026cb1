"""Questions in the place of the data sets trl-internal-testing/zen, with the signature of `datasets.load_dataset`."""

import codecs
import contextlib
import io
import random

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, IterableDatasetDict, List, Value
from PIL import Image as Pillow

PROMPT_WORDS = (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 6, 11, 2, 4, 7, 5, 5)  # of each line; a test spells prompts out
IMAGES = (1, 1, 2, 2, 1, 1, 2, 0, 2, 3, 1, 1, 3, 0, 1, 1, 1, 1, 0)  # of each row with several images
TEST_ROWS = 2


def read_zen():
    """Return the nineteen lines of the Zen of Python."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return [line for line in codecs.decode(this.s, "rot13").splitlines()[2:] if line.strip()]


def draw_image(generator):
    height, width = generator.randint(32, 63), generator.randint(32, 63)
    pixels = np.random.default_rng(generator.randrange(2**31)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def make_rows(path, name):
    """Return the columns of a data set and their types, where they cannot be inferred."""
    lines = read_zen()
    if name == "standard_prompt_only":
        return {
            "prompt": [" ".join(line.split()[:count]) for line, count in zip(lines, PROMPT_WORDS, strict=True)]
        }, None
    asked, generator = [f"What do you think of this: {line}" for line in lines], random.Random(3)
    if path.endswith("zen-multi-image"):
        part = {"type": Value("string"), "text": Value("string")}
        prompts, images = [], []
        for question, count in zip(asked, IMAGES, strict=True):
            parts = [{"type": "image", "text": None}] * count
            parts.insert(generator.randint(0, count), {"type": "text", "text": question})
            prompts.append([{"role": "user", "content": parts}])
            images.append([draw_image(generator) for _ in range(count)])
        types = Features(prompt=List({"role": Value("string"), "content": List(part)}), images=List(Image()))
        return {"prompt": prompts, "images": images}, types
    prompts = [[{"role": "user", "content": question}] for question in asked]
    if path.endswith("zen-image"):
        types = Features(prompt=List({"role": Value("string"), "content": Value("string")}), image=Image())
        return {"prompt": prompts, "image": [draw_image(generator) for _ in prompts]}, types
    return {"prompt": prompts}, None


def load_dataset(path, name, split=None, streaming=False):
    """Return the data set of this name or one of its splits."""
    columns, types = make_rows(path, name)
    rows = Dataset.from_dict(columns, features=types)
    first = len(rows) - TEST_ROWS
    parts = {"train": rows.select(range(first)), "test": rows.select(range(first, len(rows)))}
    parts = {key: part.flatten_indices() for key, part in parts.items()}
    if streaming:
        parts = {key: part.to_iterable_dataset() for key, part in parts.items()}
    if split is not None:
        return parts[split]
    return (IterableDatasetDict if streaming else DatasetDict)(parts)
