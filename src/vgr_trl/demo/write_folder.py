"""The embedded model and its questions as files, for commands that take a model folder and data files.

python -m vgr_trl.demo.write_folder OUT
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars

from vgr_trl.demo import Options
from vgr_trl.demo.demo import Rows, draw, draw_questions, learn_answers, set_up_process, warm_up, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm


def write_folder(folder: Path, *, train: int = 256, test: int = 8, text_steps: int = 200, seed: int = 0) -> None:
    """Write `model/`, `train.parquet`, `test.parquet` and an empty system prompt to `folder`, if it does not exist yet.

    The model has learned, from text alone, how answers are written; it has not learned to look. So most of its
    completions have the right form, some are right by chance, and groups with and without a gradient both occur.

    Args:
        folder: path of the folder, which appears when it is complete.
        train: number of training questions.
        test: number of test questions.
        text_steps: supervised steps, 0.02 s each on a CPU core.
        seed: seed of questions and weights.
    """
    if folder.exists():
        return
    ask = partial(draw_questions, seed=seed, multiple_choice=False)
    rows = {"train": ask(train, split="train"), "test": ask(test, split="test")}
    model, processor = build_tiny_vlm(sorted(words_of(rows["train"])), hidden_size=32, vision_depth=1, seed=seed)
    learn_answers(model, processor, rows["train"], max_steps=text_steps, learning_rate=3e-3, seed=seed)
    _save(folder, rows, model, processor)


def write_warm_folder(folder: Path, options: Options) -> None:
    """Write the same files with the questions and the model of the demo after its warm start, if `folder` is not there.

    This model looks at the image, and is right about half the time; reinforcement teaches the rest.
    """
    if folder.exists():
        return
    set_up_process(options)
    questions = draw(options.seed)
    model, processor = build_tiny_vlm(words_of(questions.train), seed=options.seed)
    warm_up(model, processor, questions, options)
    _save(folder, {"train": questions.train, "test": questions.test}, model, processor)


def _save(folder: Path, rows: Mapping[str, Rows], model: Any, processor: Any) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        written = Path(unfinished) / "written"
        written.mkdir()
        for split, questions in rows.items():
            Dataset.from_list(questions).to_parquet(written / f"{split}.parquet")
        model.save_pretrained(written / "model")
        processor.save_pretrained(written / "model")
        (written / "no_system_prompt.txt").touch()
        written.rename(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m vgr_trl.demo.write_folder", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to; left as it is if it exists")
    folder = parser.parse_args(argv).folder
    torch.set_num_threads(1)
    disable_progress_bars()
    write_folder(folder)


if __name__ == "__main__":
    main()
