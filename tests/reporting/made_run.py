"""A run folder as training leaves it, made of numbers chosen here, for the tests of the page."""

import io
import json
import math
import random
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path

from PIL import Image, ImageDraw

from vgr_trl.reporting.records import AttentionMap, Completion, LogEntry, Record, RecordedImage, Turn, encode_entry

GRID = (3, 4)
SIZE = (400, 300)
COLOURS = ("red", "blue", "green", "orange")
SEGMENTS = ("all", "early", "middle", "late")


def thumbnail(folder: Path, colour: str, cell: int) -> str:
    picture = Image.new("RGB", (256, 192), "white")
    row, column = divmod(cell, GRID[1])
    ImageDraw.Draw(picture).ellipse((column * 64 + 6, row * 64 + 6, column * 64 + 58, row * 64 + 58), fill=colour)
    data = io.BytesIO()
    picture.save(data, "WEBP", lossless=True)
    name = f"images/{sha1(data.getvalue(), usedforsecurity=False).hexdigest()}.webp"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data.getvalue())
    return name


def completion(
    folder: Path, question: int, right: bool, *, tokens: Sequence[str] | None = None, prompt: str | None = None
) -> Completion:
    """Return a completion that answers question number `question`; token number t looks at cell t mod 12 alone."""
    colour = COLOURS[question % 4]
    said = colour if right else COLOURS[(question + 1) % 4]
    thought = ["<think>", "The", " disc", " is", f" {said}", ".", "</think>"]
    pieces = list(tokens or [*thought, "<answer>", said, "</answer>", "<end>"])
    count, cells = len(pieces), GRID[0] * GRID[1]
    dice = random.Random(f"{question} {right}")
    rows = [bytes(255 if cell == token % cells else 0 for cell in range(cells)) for token in range(count)]
    vgr = [round(math.exp(dice.gauss(0, 0.6)), 4) for _ in pieces]
    dependency, entropies, logps = ([sign * round(dice.random(), 4) for _ in pieces] for sign in (1, 1, -1))
    segment = {"vgr": 1.5, "aei_vision": 0.8, "aei_instruction": 1.2, "mdi_balance": 0.4}
    return Completion(
        question=f"question-{question}", group=question, text="".join(pieces[:-1]), tokens=pieces, solution=colour,
        prompt=prompt if prompt is not None else f"<image> What colour is disc number {question}?",
        weights=[round(1 / value, 4) for value in vgr], dependency=dependency, vgr=vgr, entropies=entropies,
        advantages=[(0.5 if right else -0.5) / value for value in vgr], logps=logps, correct=right,
        signals={"place": list(map(float, range(count)))}, credit={"odd": [token % 2 for token in range(count)]},
        rewards={"accuracy_reward": float(right), "vgr_reward": 0.25, "format": 1.0 if tokens is None else None},
        reward=1.25 if right else 0.25, advantage=0.5 if right else -0.5, metrics=dict.fromkeys(SEGMENTS, segment),
        images=[RecordedImage(thumbnail(folder, colour, question % cells), *SIZE, GRID)],
        attention=AttentionMap([0.02 * (token + 1) for token in range(count)], b"".join(rows)),
    )  # fmt: skip


def with_tools(folder: Path) -> Completion:
    """Return a completion of three turns, after two of which a part of the image is returned, of two by two cells.

    Each token of turn n looks at the first cell of image n alone.
    """
    asks = [f"zoom(box=[{left}, 0, {left + 0.5}, 0.5])" for left in (0.0, 0.5)]
    turns, pieces, owners = [], [], []
    for number, call in enumerate([*asks, None]):
        own = ["Let", " me", f" look. <tool_call>{call}</tool_call>"] if call else ["It", " is", " red", "."]
        given = ["<|im_start|>tool", "<image>", "", "", "", "closer", "<|im_end|>"] if call else []
        stop = len(pieces) + len(own)
        calls = [call] if call else []
        turns.append(Turn(len(pieces), stop, calls, ["<image>closer"] * len(calls), len(calls)))
        pieces += [*own, *given]
        owners += [number] * len(own) + [-1] * len(given)
    made = completion(folder, 7, True, tokens=pieces)
    cells = [0, GRID[0] * GRID[1], GRID[0] * GRID[1] + 4]
    rows = [bytes(255 if own >= 0 and cell == cells[own] else 0 for cell in range(cells[-1] + 4)) for own in owners]
    parts = [thumbnail(folder, colour, 5) for colour in COLOURS[:2]]
    made.images += [RecordedImage(file, 56 * (number + 1), 56, (2, 2)) for number, file in enumerate(parts)]
    made.turns = turns
    made.attention = AttentionMap([0.25 * (own + 1) for own in owners], b"".join(rows))
    return made


def make_run(
    output_dir: Path, *, steps: int = 6, name: str | None = None, offset: float = 0.0, extra: Sequence[Completion] = (),
    prompt: str | None = None, weight: float = 1.0, seed: int = 0,
) -> Path:  # fmt: skip
    """Write a run: questions 0 and 1 are evaluated first and last, wrong and then right; return its folder.

    `prompt` has a `{}` in the place of the question. `weight` is that of the accuracy, as the run says.
    """
    folder = output_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)  # `extra` may have left its thumbnails there
    description = {"version": 1, "name": name or output_dir.name, "created": "2026-01-02T03:04:05Z", "model": "tiny"}
    description |= {"rewards": ["accuracy_reward", "vgr_reward", "format"], "changed": ["beta", "max_steps"]}
    options = {"beta": 0.0, "seed": seed, "max_steps": steps, "temperature": 1.0, "num_generations": 2}
    description["options"] = options
    description["setup"] = {"rewards": f"accuracy_reward x {weight:g}, vgr_reward x 1", "device": "1 x CPU"}
    (output_dir / "run.json").write_text(json.dumps({"recipe": "mdi", "data": "train.jsonl", "lora": None}))
    weights = {"accuracy_reward": weight, "vgr_reward": 1.0}
    (folder / "run.json").write_text(json.dumps(description), encoding="utf-8")
    records, logs = [], []
    for step in range(1, steps + 1):
        if step in (1, steps):
            answered = [completion(folder, question, step == steps) for question in (0, 1)]
            scores = {"eval_reward": 0.3 + offset + step / 50, "eval_rewards/accuracy_reward/mean": 0.5}
            records.append(Record(step, "eval", 0.0, answered, weights))
            logs.append(LogEntry(step, "eval", 0.0, scores))
        sampled = [completion(folder, 2 * step + index, (step + index) % 2 == 0) for index in range(2)]
        records.append(Record(step, "train", 0.0, [*sampled, *extra], weights))
        logs.append(LogEntry(step, "train", 30.0 * step, logged(step, steps, offset)))
    for item in (item for record in records for item in record.completions if prompt is not None):
        item.prompt = str(prompt).format(item.prompt)
    (folder / "records-000001.jsonl").write_bytes(b"".join(map(encode_entry, records)))
    (folder / "logs.jsonl").write_bytes(b"".join(map(encode_entry, logs)))
    return output_dir


def logged(step: int, steps: int, offset: float) -> dict[str, float | None]:
    done = step / steps
    values: dict[str, float | None] = {
        "reward": 0.3 + 0.5 * done + offset, "rewards/accuracy_reward/mean": 0.2 + 0.6 * done + offset,
        "rewards/vgr_reward/mean": 0.5, "sensitivity_score_mean": 0.1 * done, "replay/replaced_fraction": 0.25,
        "clip_ratio/high_mean": 0.01 * done, "entropy": None if step == 2 else 1.5 - done, "loss": 0.01 * step,
    }  # fmt: skip
    for segment in SEGMENTS:
        values[f"attention/{segment}/vgr"] = 1.5 - 0.4 * done + offset
        values[f"attention/{segment}/aei_vision"] = 0.8 + 0.1 * done
    return values
