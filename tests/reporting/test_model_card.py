from pathlib import Path
from typing import Any

import yaml


def test_the_trainer_writes_the_card(tmp_path: Path, text_trainer: Any) -> None:
    def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    sizes = {"per_device_train_batch_size": 4, "max_completion_length": 4}
    trainer = text_trainer(length_reward, output_dir=tmp_path, enable_entropy_filtering=True, **sizes)
    trainer.create_model_card("tiny", tags="mine")
    trainer.create_model_card("tiny", tags="mine")  # at every checkpoint again: what ours adds stands there once
    card = (tmp_path / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert {"mine", "trl", "grpo", "dapo", "vgr_trl"} <= set(yaml.safe_load(head)["tags"])
    assert body.count("### Training signal") == 1
    assert "| `length_reward` | 1 |" in body
