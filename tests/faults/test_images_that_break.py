"""An image that is deleted or cut after the data were checked: the row and the file are named, and the run goes on."""

import json
import shutil

import pytest
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
        lines.append({"problem": row["problem"], "solution": row["solution"], "choices": row["choices"], "image": name})
    (made / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


class Break(TrainerCallback):
    def __init__(self, folder, cut):
        self.folder, self.cut = folder, cut

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            for path in self.folder.glob("*.png"):
                path.write_bytes(path.read_bytes()[:60]) if self.cut else path.unlink()


def trainer_of(model_folder, data, output):
    rows, _ = prepare_rows(load_split("train", data_files=str(data / "train.jsonl")), root=data, system_prompt=None)
    options = config(output, save_strategy="steps", save_steps=1, max_steps=4, rollout_log_steps=0)
    return vision_trainer(model_folder, letters_reward, options, rows)


@pytest.mark.parametrize("cut", [False, True], ids=["deleted", "cut"])
def test_the_image_is_named_and_the_run_goes_on(cut, model_folder, folder, tmp_path):
    whole = trainer_of(model_folder, folder, tmp_path / "whole")
    whole.train()
    kept = shutil.copytree(folder, tmp_path / "kept")
    trainer = trainer_of(model_folder, folder, tmp_path / "run")
    trainer.add_callback(Break(folder, cut))
    with pytest.raises(DataError, match="image is truncated" if cut else r"image file .*\d.png does not exist"):
        trainer.train()
    assert trainer.state.global_step in (2, 3)  # batches are drawn one ahead
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    resumed = trainer_of(model_folder, folder, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), abs=1e-6)
