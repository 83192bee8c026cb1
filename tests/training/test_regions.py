"""Boxes of the data in a training run: the tokens they are, the signal, the reward, the record."""

import pytest
import torch
from datasets import IterableDataset
from support.trainers import letters_reward

from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards import load_reward
from vgr_trl.training.passes import score
from vgr_trl.training.recording.pictures import images_of_row


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
    of_rollout = score.region_mask

    def noted(rollout, host, measurement, prompt_ids):
        vision = torch.isin(prompt_ids, torch.tensor(measurement.vision_token_ids))
        region = of_rollout(rollout, host, measurement, prompt_ids)
        found.extend((row["bbox"], own[seen]) for row, own, seen in zip(rollout.rows, region, vision, strict=True))
        return region

    monkeypatch.setattr(score, "region_mask", noted)
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


@pytest.mark.parametrize(
    ("box", "said"),
    [
        (
            [0.0, 0.0, 2.0, 0.5],
            r"has the box \(0.0, 0.0, 2.0, 0.5\) in its column bbox: give left, top, right and bottom",
        ),
        ([0.5, 0.0, 0.5, 0.5], ".* with left < right and top < bottom"),
        ([0.5, 0.0, 1.0], r"has \[0.5, 0.0, 1.0\] in its column bbox: give four numbers"),
    ],
)
def test_a_box_beyond_its_image_is_told_by_its_row_before_the_first_step(make, box, said):
    with pytest.raises(DataError, match=f"^Row 1 of the train data {said}"):
        make([[0.0, 0.0, 1.0, 0.5], box], signals=["region_focus"])


def test_a_region_beyond_its_image_in_pixels(vision_trainer):
    rows = vision_trainer.rows
    wide, high = rows[0]["image"].size
    boxes = [[[0.0, 0.0, 1.0, 0.5]]] * 2 + [[[0.0, 0.0, wide + 1.0, high]]] * (len(rows) - 2)
    with pytest.raises(
        DataError, match=f"^Row 2 of the train data .* column regions: .* pixels of its {wide} x {high}"
    ):
        vision_trainer(load_reward("region"), rows.add_column("regions", boxes))


def test_a_box_of_a_stream_is_told_by_its_id(vision_trainer):
    boxes = [[0.0, 0.0, 2.0, 0.5]] * len(vision_trainer.rows)
    rows = vision_trainer.rows.add_column("bbox", boxes)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    run = vision_trainer(load_reward("region"), stream, max_completion_length=4, max_steps=1)
    with pytest.raises(DataError, match=r"^The row with the id .+ has the box \(0.0, 0.0, 2.0, 0.5\)"):
        run.train()


def test_boxes_that_nothing_reads_are_not_looked_at(vision_trainer):
    rows = vision_trainer.rows
    rows = rows.add_column("bbox", [[0.0, 0.0, 200.0, 300.0]] * len(rows))
    assert vision_trainer(letters_reward, rows, max_steps=1).train_dataset


def test_the_report_gets_the_box_in_pixels(png):
    (recorded,), _, _ = images_of_row({"image": str(png), "bbox": [0.25, 0.0, 1.0, 0.5]}, [])
    assert recorded.regions == [(2.0, 0.0, 6.0, 4.0)]
    (recorded,), _, _ = images_of_row({"image": str(png), "bbox": [9, 9, 9, 9]}, [])
    assert recorded.regions is None
