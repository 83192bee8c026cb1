"""Tiny versions of what the commands of the pages name: models, questions, configurations, sets."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from support.made_sets import jsonl, picture, written

from vgr_trl.demo.demo import draw_questions
from vgr_trl.recipes import TEMPLATES, recipe_file

MODELS = ("MODEL", "runs/first", "runs/second", "tiny_vlm/model", "runs/tiny/embedded/model")
SETS = ("HuggingFaceM4/A-OKVQA", "lujunxi57/DDM", "some/questions")


def fill_shelf(shelf: Path, model: Path, questions: str, models_of_the_hub: Iterable[str]) -> None:
    for folder in {*MODELS, *(f"hub/{name}" for name in models_of_the_hub)}:
        shutil.copytree(model, shelf / folder)
    for folder in ("", "tiny_vlm", "runs/tiny/embedded", *(f"hub/{name}" for name in SETS)):
        (shelf / folder).mkdir(parents=True, exist_ok=True)
        (shelf / folder / "no_system_prompt.txt").touch()
        for part in questions.split(","):
            shutil.copy(part.partition("=")[2], shelf / folder)
    laptop = (TEMPLATES / "laptop.yaml").read_text(encoding="utf-8").format(name="", tiny=shelf / "tiny_vlm")
    texts = {
        "train.yaml": laptop, "mine.yaml": laptop, "my_method.yaml": recipe_file("papo").read_text(encoding="utf-8"),
    }  # fmt: skip
    for name, text in texts.items():
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
