"""A row whose image turns out to be damaged when it is used is replaced by the next, on every process alike."""

import os
from pathlib import Path

import pytest
from accelerate.utils import gather_object
from datasets import Dataset
from support.launching import results_of
from support.trainers import config, prompts, train_file, vision_trainer

from vgr_trl.data.rows import prepare_rows

ROWS, DAMAGED = 6, 2


def damaged_within(path: Path) -> None:
    """Change bytes of the pixels, so that the header can be read and the end is there."""
    data = bytearray(path.read_bytes())
    place = data.index(b"IDAT") + 20
    data[place : place + 8] = bytes(8)
    path.write_bytes(data)


def train(data, folder: Path, checkpoint: str | None = None) -> dict[str, list]:
    seen: list[list[int]] = []

    def reward(completions, row, **kwargs):
        seen.append(gather_object(row))
        return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]

    rows, skipped = prepare_rows(Dataset.load_from_disk(data[1]), root=Path(data[1]).parent, system_prompt=None)
    assert not skipped
    options = config(
        folder, per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", 1)), num_generations=4,
        max_completion_length=4, num_train_epochs=1, save_strategy="steps", save_steps=1, logging_steps=1,
        dataloader_num_workers=int(data[2]), compute_attention_metrics=False, shuffle_dataset=False,
    )  # fmt: skip
    trainer = vision_trainer(data[0], reward, options, rows)
    trainer.train(resume_from_checkpoint=checkpoint)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rows": seen,
        "losses": [entry["loss"] for entry in logged],
        "replaced": [entry.get("data/prompts_replaced") for entry in logged],
    }


@pytest.mark.parametrize(("processes", "workers"), [(1, 1), (2, 0)])
def test_the_next_row_takes_its_place(processes, workers, model_folder, question_files, tmp_path):
    lines = []
    for number, row in enumerate(prompts(train_file(question_files)).select(range(ROWS))):
        row["image"].save(tmp_path / f"{number}.png")
        lines.append({name: row[name] for name in ("problem", "solution", "choices")} | {"image": f"{number}.png"})
    Dataset.from_list([line | {"row": number} for number, line in enumerate(lines)]).save_to_disk(tmp_path / "rows")
    damaged_within(tmp_path / f"{DAMAGED}.png")
    data = str(model_folder), str(tmp_path / "rows"), workers
    whole = results_of(train, data, tmp_path / "whole", processes=processes)[0]
    expected = [0, 1, 3, 3, 4, 5]
    assert whole["rows"] == [[row] * 4 for row in expected]
    assert whole["replaced"] == [None, None, 1.0, None, None, None]
    rest = results_of(train, data, tmp_path / "rest", str(tmp_path / "whole" / "checkpoint-2"), processes=processes)[0]
    assert rest["rows"] == whole["rows"][2:]
    assert rest["losses"] == pytest.approx(whole["losses"], abs=1e-6)
