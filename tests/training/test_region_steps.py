import pytest
import torch
from datasets import load_dataset
from support.trainers import train_file

from vgr_trl import measure
from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.data.images import ImageLimits
from vgr_trl.errors import ConfigError
from vgr_trl.reporting.recorder import read_row_images
from vgr_trl.rewards import load_reward


@pytest.fixture
def make(vision_trainer):
    questions = vision_trainer.rows

    def build(boxes, **options):
        rows = questions if boxes is None else questions.add_column("bbox", (boxes * len(questions))[: len(questions)])
        return vision_trainer(load_reward("region"), rows, max_completion_length=4, max_steps=1, **options)

    return build


def test_half_of_an_image_is_half_of_its_tokens(make, monkeypatch):
    """Every other row names the upper half, the others nothing; all rows of a prompt have the same tokens."""
    run, found = make([[0.0, 0.0, 1.0, 0.5], None], signals=["region_focus"]), []
    of_rollout = measure.region_mask

    def noted(run, rollout, prompt_ids):
        vision = torch.isin(prompt_ids, torch.tensor(run.measurement.vision_token_ids))
        region = of_rollout(run, rollout, prompt_ids)
        found.extend((row["bbox"], own[seen]) for row, own, seen in zip(rollout.rows, region, vision, strict=True))
        return region

    monkeypatch.setattr(measure, "region_mask", noted)
    run.train()
    assert len(found) == 8
    for box, tokens in found:
        half = len(tokens) // 2
        assert tokens.tolist() == [box is not None] * half + [False] * half
    logged = run.state.log_history[0]
    without = sum(box is None for box, _ in found) / 8
    assert logged["rewards/region_reward/not_applicable"] == pytest.approx(without)
    if without < 1:
        assert 0 < logged["signals/region_share"] < 1
        assert logged["signals/region_focus"] == pytest.approx(2 * logged["signals/region_share"], rel=1e-5)


def test_data_without_boxes(make):
    with pytest.raises(ConfigError, match="the reward region_reward cannot be used here: the data have neither of the"):
        make(None)
    with pytest.raises(ConfigError, match='attention_source is "generate", which does not know regions'):
        make([[0.0, 0.0, 1.0, 0.5]], attention_source="generate")


def test_boxes_in_pixels_are_of_the_image_as_it_is_trained_on(vision_trainer, question_files, caplog):
    questions = load_dataset("parquet", data_files=train_file(question_files), split="train")
    wide, high = questions[0]["image"].size
    half = [0.0, 0.0, wide // 2 + 0.0, high // 2 + 0.0]
    boxes = [[half], [[0.0, 0.0, wide // 2 + 1.0, 2.0]], [[0.0, 0.0, 1.0, 0.5]], [[0.0, 0.0, wide + 1.0, 2.0]]]
    questions = questions.add_column("regions", boxes * 4)
    smaller = ImageLimits(max_pixels=(wide // 2) * (high // 2))
    for rows in (
        prepare_rows(questions, images=smaller, boxes=True)[0],
        vision_trainer(load_reward("region"), prepare_rows(questions, images=smaller)[0]).train_dataset,
    ):
        assert rows["regions"] == [[half], [[0.0, 0.0, 1.0, 0.5]]] * 4
    assert f"in pixels of its {wide // 2} x {high // 2}, and within it." in " ".join(caplog.messages)
    whole = vision_trainer(load_reward("region"), vision_trainer.rows.add_column("regions", boxes * 4)).train_dataset
    assert whole["regions"] == boxes[:3] * 4


def test_the_report_gets_the_box_in_pixels(png):
    row = {"image": str(png), "bbox": [0.25, 0.0, 1.0, 0.5]}
    (recorded,), _ = read_row_images(row, [row["image"]], [])
    assert recorded.regions == [(2.0, 0.0, 6.0, 4.0)]
