"""An image that is deleted or cut after the data were checked: the row and the file are named, and the run goes on."""

import pytest
from support.made_sets import jsonl
from support.trainers import config, letters_reward, logged, prompts, train_file, vision_trainer
from transformers import TrainerCallback

from vgr_trl.data.load import load_split
from vgr_trl.data.rows import prepare_rows
from vgr_trl.utils import DataError


@pytest.fixture
def folder(question_files, tmp_path):
    made, lines = tmp_path / "data", []
    made.mkdir()
    for number, row in enumerate(prompts(train_file(question_files))):
        row["image"].save(made / f"{number}.png")
        name = "nowhere.png" if number == 1 else f"{number}.png"
        lines.append({key: row[key] for key in ("problem", "solution", "choices")} | {"image": name})
    jsonl(made / "train.jsonl", lines)
    return made


class Break(TrainerCallback):
    """Deletes or cuts the images of a folder after the second step."""

    def __init__(self, folder, cut):
        self.cut, self.images = cut, {path: path.read_bytes() for path in folder.glob("*.png")}

    def on_step_end(self, args, state, control, **kwargs):
        for path, data in self.images.items() if state.global_step == 2 else ():
            path.write_bytes(data[:60]) if self.cut else path.unlink()

    def mend(self):
        for path, data in self.images.items():
            path.write_bytes(data)


def trainer_of(model_folder, data, output):
    rows, _ = prepare_rows(load_split("train", data_files=str(data / "train.jsonl")), root=data, system_prompt=None)
    options = config(output, save_strategy="steps", save_steps=1, max_steps=4, rollout_log_steps=0)
    return vision_trainer(model_folder, letters_reward, options, rows)


@pytest.mark.parametrize("cut", [False, True], ids=["deleted", "cut"])
def test_the_image_is_named_and_the_run_goes_on(cut, model_folder, folder, tmp_path):
    whole = trainer_of(model_folder, folder, tmp_path / "whole")
    whole.train()
    trainer, breaking = trainer_of(model_folder, folder, tmp_path / "run"), Break(folder, cut)
    trainer.add_callback(breaking)
    with pytest.raises(DataError, match="image is truncated" if cut else r"image file .*\d.png does not exist"):
        trainer.train()
    assert trainer.state.global_step in (2, 3)  # batches are drawn one ahead
    breaking.mend()
    resumed = trainer_of(model_folder, folder, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-6)
