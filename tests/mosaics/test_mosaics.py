"""The task of the mosaics: exact boxes, separate digits, nothing to read at first sight, and an oracle that knows."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from mosaics import task
from mosaics.controls import DecisionOptions, at_random, oracle
from mosaics.model import build_model, zoom_call
from mosaics.runs import decision_ids

from vgr_trl.tools import Zoom


def seen_by_tool(row: dict) -> Image.Image:
    environment = Zoom()
    environment.reset(image=row["image"])
    return environment.zoom([*row["box"]])[0]["image"]


def test_the_box_holds_the_whole_digit_and_no_other(monkeypatch):
    """Digits are drawn as squares whose grey says which digit: the zoom on the truth shows every pixel of one."""
    squares = np.ones((10, 8, 8)) * (np.arange(10)[:, None, None] + 5) / 14
    monkeypatch.setattr(task, "digits", lambda split: (squares, np.arange(10)))
    for row in task.draw_rows(60, seed=0, split="test"):
        part = np.asarray(seen_by_tool(row).convert("L")).astype(float)
        part = part[2:-2, 2:-2] if row["grid"] == 3 else part  # 0.33 and 0.67 are up to a pixel off, outwards
        paper = np.median(part[[0, 0, -1, -1], [0, -1, 0, -1]])
        brightness = (part.max() - paper) / (255 - paper) * 14 - 5
        assert round(brightness) == int(row["solution"])


def test_training_and_held_out_digits_are_disjoint():
    train, test = ({ink.tobytes() for ink in task.digits(split)[0]} for split in ("train", "test"))
    assert len(train) > 1300
    assert len(test) > 390
    assert not train & test


def test_a_digit_can_be_read_in_its_box_and_hardly_at_first_sight():
    """The nearest of 1,500 known pictures, in the pixels that the model gets: of the part, and around the place."""
    right = {}
    for name in ("part", "mosaic"):
        pixels, labels = [], []
        for split, count in (("train", 1500), ("test", 300)):
            for row in task.draw_rows(count, seed=0, split=split, singles=0.0):
                left, top, *_ = (round(task.SHOWN * side) for side in row["box"])
                image = seen_by_tool(row) if name == "part" else row["image"]
                small = np.asarray(image.convert("L").resize((task.SHOWN, task.SHOWN), Image.Resampling.BICUBIC)) / 255
                seen = small if name == "part" else np.pad(small, 1)[top : top + 5, left : left + 5]
                pixels.append((seen - seen.min()).ravel())
                labels.append(int(row["solution"]))
        inputs, known = torch.tensor(np.array(pixels)), torch.tensor(labels)
        nearest = torch.cdist(inputs[1500:], inputs[:1500]).argmin(1)
        right[name] = (known[nearest] == known[1500:]).float().mean().item()
    assert right["part"] > 0.6, right
    assert right["mosaic"] < 0.35, right


def test_the_oracle_keeps_what_decides_where_to_look():
    _, processor = build_model(0)
    turn = processor.apply_chat_template([zoom_call((0.0, 0.33, 0.67, 0.67))], tokenize=False) + "<answer>1</answer>"
    ids = torch.tensor([processor.tokenizer(turn)["input_ids"]])
    mask, options = torch.ones_like(ids, dtype=torch.bool), DecisionOptions(**decision_ids(processor.tokenizer))
    kept, _ = oracle(None, None, mask, options, completion_ids=ids)
    box = '<tool_call>{"name": "zoom", "arguments": {"box": [0.0, 0.33, 0.67, 0.67'
    assert processor.tokenizer.decode(ids[kept]) == box + "<answer>"
    drawn, _ = at_random(None, None, mask, options, completion_ids=ids)
    assert drawn.sum() == kept.sum()
    assert (drawn != kept).any()
