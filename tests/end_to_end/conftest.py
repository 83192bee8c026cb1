"""A tiny model and drawn questions on disk, as a user of the commands has them."""

from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, List, Value

from vgr_trl.demo.shapes import FAMILIES, draw_questions
from vgr_trl.demo.tiny_vlm import build_tiny_vlm

FEATURES = Features(
    {
        "id": Value("string"),
        "source": Value("string"),
        "family": Value("string"),
        "image": Image(),
        "problem": Value("string"),
        "choices": List(Value("string")),
        "solution": Value("string"),
        "thought": Value("string"),
    }
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    texts = [problem for problem, _ in FAMILIES.values()] + [word for _, words in FAMILIES.values() for word in words]
    model, processor = build_tiny_vlm([*texts, "A. B. C. D."], hidden_size=32, num_layers=3, vision_depth=1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def question_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("questions")
    for split, count in (("train", 16), ("test", 6)):
        rows = draw_questions(count, seed=0, split=split)
        Dataset.from_list(rows, features=FEATURES).to_parquet(folder / f"{split}.parquet")
    return f"train={folder}/train.parquet,test={folder}/test.parquet"
