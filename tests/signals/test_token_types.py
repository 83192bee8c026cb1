"""Token types of completions: what is generated sees nothing of what comes after it."""

import torch
from support.models.compare import scored, with_head
from support.models.eager_reference import SPECIAL_IDS
from support.models.families import IMAGE
from test_scoring import arguments

from vgr_trl.signals import RolloutScorer


def later_logps(model, batch, column):
    """Log-probabilities of the first `column` tokens of the completions, given those tokens alone."""
    length = batch.completion_length
    inputs = {
        name: value if name == "pixel_values" else value[:, : value.size(1) - length + column]
        for name, value in batch.inputs.items()
    }
    with torch.no_grad():
        logps = model(**inputs).logits[:, -column - 1 : -1].log_softmax(-1)
    return logps.gather(-1, inputs["input_ids"][:, -column:, None]).squeeze(-1)


def test_completions_do_not_see_their_future(paligemma):
    """What a token is worth does not depend on those behind it."""
    model, batch = paligemma
    tensors, options = arguments(batch)  # token types of the prompts
    scorer = RolloutScorer(model, vision_token_ids=[IMAGE], special_token_ids=SPECIAL_IDS)
    found = scorer.score(*tensors, **options)
    assert (found.logps[:, :3] - later_logps(model, batch, 3)).abs().max() < 1e-5


def test_the_trainer_corrects_what_trl_pads(paligemma, text_trainer):
    """TRL gives completions the token type 0, under which they see their own future."""
    trainer = text_trainer()
    model, batch = paligemma
    expected, _ = scored(with_head(model), batch)
    inputs = {"pixel_values": batch.inputs["pixel_values"], "num_images": [1] * 6}
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, 12, batch_size=3, token_type_ids=torch.zeros_like(ids), **inputs
        )
    assert (logps - expected)[mask[:, -12:].bool()].abs().max() < 1e-5
