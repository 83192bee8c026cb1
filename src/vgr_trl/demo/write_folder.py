"""The embedded model and its questions as files, for commands that take a model folder and data files.

python -m vgr_trl.demo.write_folder OUT
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Value, disable_progress_bars
from datasets import Image as ImageFeature

from vgr_trl.data.rows.text.prompts import build_prompt
from vgr_trl.demo.shapes import Split, draw_questions
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.demo.warm_start import learn_answers, target_text

FEATURES = Features(
    {name: Value("string") for name in ("id", "source", "family", "problem", "solution", "thought")}
    | {"image": ImageFeature()}
)
NO_SYSTEM_PROMPT = "no_system_prompt.txt"


def write_folder(folder: Path, *, train: int = 256, test: int = 8, text_steps: int = 200, seed: int = 0) -> None:
    """Write `model/`, `train.parquet`, `test.parquet` and an empty system prompt to `folder`, if it does not exist yet.

    The model has learned, from text alone, how answers are written; it has not learned to look. So most of its
    completions have the right form, some are right by chance, and groups with and without a gradient both occur.

    Args:
        folder: where to; it appears when it is complete.
        text_steps: supervised steps, 0.02 s each on a CPU core.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        written = Path(unfinished) / "written"
        _write(written, {"train": train, "test": test}, text_steps, seed)
        try:
            written.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise


def _write(folder: Path, counts: dict[Split, int], text_steps: int, seed: int) -> None:
    folder.mkdir()
    rows: dict[str, list[dict[str, Any]]] = {
        split: draw_questions(count, seed=seed, split=split, multiple_choice=False) for split, count in counts.items()
    }
    for split, questions in rows.items():
        Dataset.from_list(questions, features=FEATURES).to_parquet(folder / f"{split}.parquet")
    texts = [build_prompt(row["problem"], system_prompt=None)[0]["content"] for row in rows["train"]]
    texts += [target_text(row) for row in rows["train"]]
    model, processor = build_tiny_vlm(sorted(set(texts)), hidden_size=32, vision_depth=1, seed=seed)
    learn_answers(model, processor, rows["train"], max_steps=text_steps, learning_rate=3e-3, seed=seed)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    (folder / NO_SYSTEM_PROMPT).touch()


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
