"""What the model card says of a run: in front of what TRL says of frameworks, and in a form that Markdown keeps."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgr_trl import DAPOConfig
from vgr_trl.reporting.model_card import DAPO, PAPERS, add_method_section, method_tags

CARD = (
    "---\ntags: []\n---\n\n# Model\n\nTrained.\n\n### Framework versions\n\n- TRL: 1.16\n\n## Citations\n\nCite TRL.\n"
)


@pytest.mark.parametrize(
    ("changed", "rewards", "arxiv", "tags"),
    [
        ({"token_weights": True}, ["mdi_reward"], "2508.10552", ["vision-gain-ratio"]),
        ({"use_entropy_penalty": True}, [], "2510.09285", ["vppo"]),
        ({"perception_loss_weight": 0.01}, [], "2507.06448", ["papo"]),
        ({"advantage_estimator": "rloo"}, [], "2402.14740", []),
    ],
)
def test_each_method_is_cited_once_and_tagged(
    changed: dict[str, Any], rewards: list[str], arxiv: str, tags: list[str]
) -> None:
    args = DAPOConfig("out", use_cpu=True, bf16=False, **changed)
    assert re.findall(r"eprint *= \{(.*)\}", add_method_section(CARD, args, rewards)) == [arxiv]
    assert method_tags(args, rewards) == ["dapo", "vgr_trl", *tags]


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
    assert "`top_p_entropy_tokens=0.2`" in body
    assert PAPERS[DAPO].link in body  # TRL's sentence on the method
    assert body.count("@misc{") == 2
    assert {"trl", "grpo", "dapo", "vgr_trl"} <= set(trainer.model.model_tags)
    assert "None" not in card
