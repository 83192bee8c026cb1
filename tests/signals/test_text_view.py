"""Completions behind prompts without images, in one pass with the prompts that have them: as each row alone."""

import pytest
import torch
from support.models.families import PAD, PIXEL_INPUTS, TEXT, build, make_batch

from vgr_trl.batch import Prompts, scoring_inputs, stacked_inputs, text_inputs
from vgr_trl.sharing import share_prompts

TILES = {"internvl": [1] * 6}


def trl_batch(name, batch):
    """The batch as TRL keeps it, and the prompts without their images."""
    inputs, length = dict(batch.inputs), batch.completion_length
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    kept = {
        "prompt_ids": ids[:, :-length], "prompt_mask": mask[:, :-length], "completion_ids": ids[:, -length:],
        "completion_mask": mask[:, -length:], "num_images": [1] * len(ids), **inputs,
    }  # fmt: skip
    if name in TILES:
        kept["num_tiles"] = TILES[name]
    words = [[token for token in row.tolist() if token >= TEXT] for row in kept["prompt_ids"]]
    return kept, Prompts(words, None, {})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_families(name):
    model, batch = build(name), make_batch(name)
    kept, prompts = trl_batch(name, batch)
    stacked = stacked_inputs([text_inputs(kept, prompts, PAD), scoring_inputs(kept)])
    length = stacked.pop("logits_to_keep")
    assert stacked.pop("num_images") == [0] * 6 + [1] * 6
    stacked.pop("num_tiles", None)
    assert {key for key in stacked if key in PIXEL_INPUTS} == {key for key in batch.inputs if key in PIXEL_INPUTS}
    with torch.no_grad(), share_prompts(model, length) as report:
        together = model(**stacked).logits[:6, -length - 1 : -1]
    assert report.prompts_per_row < 1
    for row, words in enumerate(prompts.ids):
        valid = kept["completion_mask"][row].bool()
        ids = torch.cat([torch.tensor(words), kept["completion_ids"][row][valid]])
        with torch.no_grad():
            alone = model(input_ids=ids.unsqueeze(0)).logits[0, len(words) - 1 : -1]
        found = together[row, : int(valid.sum())]
        assert torch.allclose(found.log_softmax(-1), alone.log_softmax(-1), atol=2e-5), row
