"""The task for lmms-eval, without lmms-eval: what it shows and how it judges."""

import runpy
from pathlib import Path

import yaml

from vgr_trl.data.prompts import SYSTEM_PROMPT
from vgr_trl.demo.demo import draw_questions

FOLDER = Path(__file__).parents[2] / "examples" / "lmms_eval"


def test_the_task_shows_image_and_choices_and_judges_the_answer():
    task = runpy.run_path(str(FOLDER / "questions.py"))
    row = draw_questions(1, seed=3, split="test")[0]
    (image,) = task["images"](row)
    assert (image.size, image.mode) == (row["image"].size, "RGB")
    shown = task["text"](row, {})
    assert shown.startswith(row["problem"])
    assert all(choice in shown for choice in row["choices"] or [])
    assert task["results"](row, [f"<answer>{row['solution']}</answer>"]) == {"accuracy": 1.0}
    assert task["results"](row, ["no idea"]) == {"accuracy": 0.0}


def test_the_conversation_is_that_of_training(tmp_path):
    task = runpy.run_path(str(FOLDER / "questions.py"))
    row = draw_questions(1, seed=3, split="test")[0]
    row["problem"] = "Look: <image> " + row["problem"]
    system, user = task["messages"](row)
    assert system == {"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]}
    before, image, after = user["content"]
    assert (before, image["type"]) == ({"type": "text", "text": "Look: "}, "image")
    assert image["url"].tobytes() == row["image"].convert("RGB").tobytes()
    assert after["text"].strip().startswith(row["problem"].split("> ")[1])
    prompt = tmp_path / "mine.txt"
    prompt.write_text("Be brief.")
    for file, said in ((str(prompt), ["Be brief."]), ("none", [])):
        given = task["messages"](row, {"system_prompt_file": file})
        assert [message["content"][0]["text"] for message in given if message["role"] == "system"] == said


def test_the_task_names_functions_that_are_there():
    text = (FOLDER / "questions.yaml").read_text(encoding="utf-8")
    settings = yaml.safe_load(text.replace("!function ", ""))
    task = runpy.run_path(str(FOLDER / "questions.py"))
    for key in ("doc_to_visual", "doc_to_text", "doc_to_messages", "process_results"):
        assert callable(task[settings[key].removeprefix("questions.")])
    assert [metric["metric"] for metric in settings["metric_list"]] == ["accuracy"]
