import os
from pathlib import Path

import pytest
from accelerate.utils import gather_object
from support.launching import results_of
from support.made_sets import jsonl
from support.trainers import config, letters_reward, logged, prompts, train_file, vision_trainer
from transformers import TrainerCallback

from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.data.load import load_split
from vgr_trl.errors import DataError


@pytest.fixture
def data(question_files, tmp_path):
    lines, folder = [], tmp_path / "data"
    folder.mkdir()
    for number, row in enumerate(prompts(train_file(question_files))):
        row["image"].save(folder / f"{number}.png")
        lines.append({name: row[name] for name in ("problem", "solution", "choices")})
        lines[-1] |= {"image": f"{number}.png", "row": number}
    return jsonl(folder / "train.jsonl", lines)


def trainer_of(model_folder, data, output, reward=letters_reward, **options):
    rows, _ = prepare_rows(load_split("train", data_files=str(data)), root=data.parent, system_prompt=None)
    options = config(output, save_strategy="steps", save_steps=1, rollout_log_steps=0, **options)
    return vision_trainer(model_folder, reward, options, rows)


class Break(TrainerCallback):
    def __init__(self, folder, cut):
        self.cut, self.images = cut, {path: path.read_bytes() for path in folder.glob("*.png")}

    def on_step_end(self, args, state, control, **kwargs):
        for path, data in self.images.items() if state.global_step == 2 else ():
            path.write_bytes(data[:60]) if self.cut else path.unlink()

    def mend(self):
        for path, data in self.images.items():
            path.write_bytes(data)


@pytest.mark.parametrize("cut", [False, True], ids=["deleted", "cut"])
def test_the_image_is_named_and_the_run_goes_on(cut, model_folder, data, tmp_path):
    (data.parent / "1.png").unlink()  # the row is left out at the start
    whole = trainer_of(model_folder, data, tmp_path / "whole", max_steps=4)
    whole.train()
    trainer, breaking = trainer_of(model_folder, data, tmp_path / "run", max_steps=4), Break(data.parent, cut)
    trainer.add_callback(breaking)
    with pytest.raises(DataError, match="image is truncated" if cut else r"image file .*\d.png does not exist"):
        trainer.train()
    assert trainer.state.global_step in (2, 3)  # batches are drawn one ahead
    breaking.mend()
    resumed = trainer_of(model_folder, data, tmp_path / "run", max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-6)


def train(model_folder, data, workers: int, folder: Path, checkpoint: str | None = None) -> dict[str, list]:
    seen: list[list[int]] = []

    def reward(completions, row, **kwargs):
        seen.append(gather_object(row))
        return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]

    batch = 4 // int(os.environ.get("WORLD_SIZE", 1))
    trainer = trainer_of(
        model_folder, data, folder, reward, per_device_train_batch_size=batch, num_train_epochs=1,
        dataloader_num_workers=workers, compute_attention_metrics=False, shuffle_dataset=False,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    replaced = [entry.get("data/prompts_replaced") for entry in trainer.state.log_history if "loss" in entry]
    return {"rows": seen, "losses": logged(trainer, "loss"), "replaced": replaced}


@pytest.mark.parametrize(("processes", "workers"), [(1, 1), (2, 0)])
def test_the_row_after_a_damaged_one_takes_its_place_on_every_process(processes, workers, model_folder, data, tmp_path):
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:6]))
    image = bytearray((data.parent / "2.png").read_bytes())
    place = image.index(b"IDAT") + 20
    image[place : place + 8] = bytes(8)
    (data.parent / "2.png").write_bytes(image)
    given = model_folder, data, workers
    (whole, *_) = results_of(train, *given, tmp_path / "whole", processes=processes)
    assert whole["rows"] == [[row] * 4 for row in (0, 1, 3, 3, 4, 5)]
    assert whole["replaced"] == [None, None, 1.0, None, None, None]
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    (rest, *_) = results_of(train, *given, tmp_path / "rest", checkpoint, processes=processes)
    assert rest["rows"] == whole["rows"][2:]
    assert rest["losses"] == pytest.approx(whole["losses"], abs=1e-6)
