"""Tiny versions of what the commands of the pages name: models, questions, configurations, sets."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from support.made_sets import jsonl, picture, written

from vgr_trl.demo.demo import draw_questions
from vgr_trl.recipes import TEMPLATES, recipe_file

MODELS = ("MODEL", "runs/first", "runs/second", "tiny_vlm/model", "runs/tiny/embedded/model")
SETS = ("HuggingFaceM4/A-OKVQA", "lujunxi57/DDM", "some/questions")
EASYR1 = """
data: {train_files: train.parquet, val_files: test.parquet, prompt_key: problem, answer_key: solution,
       rollout_batch_size: 4}
worker:
  actor: {model: {model_path: MODEL}, global_batch_size: 4}
  reward: {reward_function: score.py:compute_score}
  rollout: {n: 4}
"""
SCORE = "def compute_score(reward_inputs):\n    return [{'overall': 0.0} for _ in reward_inputs]\n"


def fill_shelf(shelf: Path, model: Path, questions: str, models_of_the_hub: Iterable[str]) -> None:
    """Write them to a folder, those of the hub to `hub` in it; the model and the questions are given."""
    for folder in {*MODELS, *(f"hub/{name}" for name in models_of_the_hub)}:
        shutil.copytree(model, shelf / folder)
    for folder in ("", "tiny_vlm", "runs/tiny/embedded", *(f"hub/{name}" for name in SETS)):
        (shelf / folder).mkdir(parents=True, exist_ok=True)
        (shelf / folder / "no_system_prompt.txt").touch()
        for part in questions.split(","):
            shutil.copy(part.partition("=")[2], shelf / folder)
    laptop = (TEMPLATES / "laptop.yaml").read_text(encoding="utf-8").format(name="", tiny=shelf / "tiny_vlm")
    texts = {
        "train.yaml": laptop,
        "mine.yaml": laptop,
        "my_method.yaml": recipe_file("papo").read_text(encoding="utf-8"),
        "examples/config.yaml": re.sub(r"\w+\.parquet|MODEL|score\.py", rf"{shelf}/\g<0>", EASYR1),
        "score.py": SCORE,
    }
    for name, text in texts.items():
        (shelf / name).parent.mkdir(exist_ok=True)
        (shelf / name).write_text(text, encoding="utf-8")
    (shelf / "pictures").mkdir()
    rows = draw_questions(12, seed=0, split="train")
    for row in rows:
        row["image"].save(shelf / "pictures" / f"{row['id']}.png")
    jsonl(shelf / "my.jsonl", [{**row, "image": f"pictures/{row['id']}.png"} for row in rows])
    for green, name in enumerate(("aokvqa", "arxivqa", "mmmu_pro", "ddm")):
        about = {"source": name, "problem": name, "solution": "A", "choices": ["a", "b"]}
        rows = [{"id": f"{n}", **about, "images": [picture((n, green, 0))]} for n in range(20)]
        written(rows, shelf / "data" / name)
