"""Rows that a sampler repeats are read once, whatever trains on them."""

import datasets
import pytest
import torch
from datasets import Dataset

from vgr_trl.data.images import ReadOnce, reads_alike
from vgr_trl.data.rows import prepare_rows


@pytest.fixture
def decoded(monkeypatch):
    """Numbers of pictures that were decoded."""
    seen, plain = [], datasets.Image.decode_example

    def decode(self, value, token_per_repo_id=None):
        image = plain(self, value, token_per_repo_id)
        seen.append(image.size)
        return image

    monkeypatch.setattr(datasets.Image, "decode_example", decode)
    return seen


def test_a_prompt_is_decoded_once_for_its_completions_and_micro_batches(vision_trainer, decoded):
    """4 prompts of 4 completions in 4 micro-batches, for which TRL's loader reads 16 rows four times."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
    trainer = vision_trainer(max_steps=2, compute_attention_metrics=False, rollout_log_steps=0, **sizes)
    decoded.clear()
    trainer.train()
    assert len(decoded) == 3 * 4, "a batch is read ahead of the two steps"


def test_copies_are_rows_of_their_own_with_the_same_images(decoded, png):
    rows = Dataset.from_dict({"image": [str(png)] * 3, "n": [0, 1, 2]}).cast_column("image", datasets.Image())
    read = ReadOnce(rows)
    first, copy, other = read.__getitems__([1, 1, 2])
    first["n"] = 7
    assert (copy["n"], other["n"], read[1]["n"], len(read)) == (1, 2, 1, 3)
    assert first["image"] is copy["image"] is read[1]["image"]
    assert len(decoded) == 2
    read.__getitems__([2, 0])  # 2 was in the batch before the last one: only the last is kept
    assert len(decoded) == 4


def test_rows_of_a_transform_that_may_draw_lots_are_read_each_time(png):
    rows = Dataset.from_dict({"problem": ["a ?"], "solution": ["b"], "image": [str(png)]})
    assert reads_alike(rows)
    assert reads_alike(prepare_rows(rows, split="train", root=png.parent)[0])
    assert not reads_alike(rows.with_transform(lambda batch: batch))
    assert not reads_alike(rows.to_iterable_dataset())
    assert not reads_alike(torch.utils.data.TensorDataset(torch.zeros(2)))
