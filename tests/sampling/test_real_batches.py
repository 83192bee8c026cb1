"""Batches that TRL really makes with a vision-language model: a row has the same log-probabilities wherever it goes."""

import random

import pytest
import torch
from datasets import Dataset
from PIL import Image
from support.trainers import config

from vgr_trl import DAPOTrainer
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.sampling import Placement, groups_from_batch, insert_groups

WORDS = "what colour is this red green blue yellow which of them do you see here now and there"
GROUP = 2


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def prompt(seed: int, words: int, images: int) -> list[dict]:
    """The row of one prompt, as TRL gets it: once per completion."""
    draw = random.Random(seed)
    text = " ".join(draw.choices(WORDS.split(), k=words))
    pictures = [Image.frombytes("RGB", (56, 56), draw.randbytes(56 * 56 * 3)) for _ in range(images)]
    row = {"prompt": [{"role": "user", "content": text}], "images": pictures}
    return [dict(row) for _ in range(GROUP)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    model, processor = build_tiny_vlm([WORDS], hidden_size=32, num_layers=2, num_heads=2)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim >= 2:  # weights that make the output depend on every token
            parameter.data = torch.randn(parameter.shape, generator=draw) * parameter[0].numel() ** -0.5
    ids = processor.tokenizer
    allowed = {ids.eos_token_id, *ids(WORDS)["input_ids"][:4]}  # so few that completions end at different lengths
    options = config(
        tmp_path_factory.mktemp("run"), per_device_train_batch_size=6, num_generations=GROUP, max_completion_length=8,
        num_iterations=2, beta=0.1, reuse_first_pass="off", temperature=3.0, seed=3,
        generation_kwargs={"suppress_tokens": sorted(set(range(len(ids))) - allowed)},
    )  # fmt: skip
    # Two iterations and beta above 0: batches have old and reference log-probabilities, which nothing fills in later.
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    model = type(model).from_pretrained(folder)
    rows = [prompt(seed, 5, 1)[0] for seed in range(6)]
    made = DAPOTrainer(model, length_reward, options, Dataset.from_list(rows), processing_class=processor)
    made.model.train()
    return made


def generate(trainer, *prompts):
    torch.manual_seed(sum(len(rows[0]["prompt"][0]["content"]) for rows in prompts))
    return trainer._generate_and_score_completions([row for rows in prompts for row in rows])


def logps(trainer, batch, chunk=None):
    """As TRL's `_compute_loss` asks for them, masked."""
    names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
    with torch.no_grad():
        found, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            chunk,
            **{name: batch.get(name) for name in names},
        )
    return found * batch["completion_mask"]


def row_values(values, batch):
    return [row[mask == 1] for row, mask in zip(values, batch["completion_mask"], strict=True)]


MIXES = {
    "images": ([(1, 5, 1), (2, 9, 2), (3, 7, 1)], [(4, 20, 1), (5, 3, 3), (6, 11, 1)]),
    "some without": ([(1, 5, 1), (2, 9, 0), (3, 7, 2)], [(4, 20, 0), (5, 3, 1), (6, 11, 0)]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_log_probabilities_of_moved_rows_are_those_of_their_own_batch(trainer, mix):
    pad = trainer.processing_class.tokenizer.pad_token_id
    batch, other = (generate(trainer, *(prompt(*of_prompt) for of_prompt in prompts)) for prompts in MIXES[mix])
    placement = Placement(6, GROUP)
    stored = groups_from_batch(
        other, [0, 1, 2], placement, advantages=other["advantages"], rewards=torch.zeros(6), pad_token_id=pad
    )
    expected, there = (row_values(logps(trainer, each), each) for each in (batch, other))
    assert torch.cat(there).std() > 0.3, "the rows say something"
    assert len({len(row) for row in there}) > 1
    for replacements in ({0: 2, 2: 0}, {1: 1}, {0: 0, 1: 1, 2: 2}):
        chosen = {target: stored[source] for target, source in replacements.items()}
        written, _ = insert_groups(batch, chosen, placement, pad_token_id=pad)
        sources = [replacements.get(group) for group in range(3) for _ in range(GROUP)]
        for chunk in (None, 2):
            found = row_values(logps(trainer, written, chunk), written)
            for row, source in enumerate(sources):
                wanted = expected[row] if source is None else there[GROUP * source + row % GROUP]
                torch.testing.assert_close(found[row], wanted, atol=2e-5, rtol=0)
        old = row_values(written["old_per_token_logps"], written)
        torch.testing.assert_close(torch.cat(old), torch.cat(found), atol=2e-5, rtol=0)
        assert written["ref_per_token_logps"].shape == written["completion_ids"].shape
