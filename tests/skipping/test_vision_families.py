"""Image features computed once give what passes with a vision tower give, in every family for which they are on."""

from contextlib import contextmanager

import pytest
import torch
from support.models.compare import why_plain
from support.models.families import EOS, FAMILIES, build, make_batch, with_frozen_tower
from support.models.other_families import OTHERS

from vgr_trl.efficiency.vision_cache import FAMILIES as TYPES
from vgr_trl.efficiency.vision_cache import VisionCache, parts_of_tower, why_not_once
from vgr_trl.sharing import share_prompts
from vgr_trl.sharing.model_support import base_of

KNOWN = {**FAMILIES, **OTHERS}
ROWS_OF_PIXELS = {"gemma3": 3, "llava": 3, "paligemma": 3, "internvl": 1 + 1 + 3}  # tiles; images elsewhere


@contextmanager
def tower_calls(model):
    """How often the vision tower runs meanwhile."""
    calls = []
    tower = parts_of_tower(base_of(model))[0]
    hook = tower.register_forward_hook(lambda *call: calls.append(1))
    yield calls
    hook.remove()


def scored(model, batch, *, gradients):
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        logits = model(**batch.inputs).logits[:, -batch.completion_length - 1 : -1]
        logits = logits[batch.inputs["attention_mask"][:, -batch.completion_length :].bool()]  # (tokens, V)
    if gradients:
        logits.log_softmax(-1)[..., EOS].sum().backward()
    return logits.detach()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_close(some, others):
    assert some.keys() == others.keys()
    largest = max(float(value.abs().max()) for value in others.values())
    assert largest > 0
    assert max(float((some[name] - others[name]).abs().max()) for name in others) <= 1e-5 * largest


@pytest.mark.parametrize("name", sorted(TYPES))
def test_features_are_computed_once_for_generation_scoring_and_training(name):
    model = with_frozen_tower(build(KNOWN[name]))
    batch = make_batch(KNOWN[name], images=(1, 2), generations=2)
    options = {"max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(**batch.prompt_inputs(), **options)
    logits = scored(model, batch, gradients=True)
    gradients = gradients_of(model)

    cache = VisionCache(base_of(model), 64)
    with tower_calls(model) as calls, cache.around(model):
        assert torch.equal(model.generate(**batch.prompt_inputs(), **options), tokens)
        assert len(calls) == 1
        assert_close({"": scored(model, batch, gradients=False)}, {"": logits})
    shared = share_prompts(model, batch.completion_length)
    with tower_calls(model) as more, cache.around(model), shared:  # the training pass
        assert_close({"": scored(model, batch, gradients=True)}, {"": logits})
    assert (len(calls), len(more)) == (1, 0)
    assert_close(gradients_of(model), gradients)
    images = ROWS_OF_PIXELS.get(name, 3)  # of two prompts
    plain = name == "paligemma" or why_plain(model) is not None
    wanted = (2 + 2 + (2 if plain else 1)) * images  # by two completions of each, or once where shared
    assert cache.metrics() == {"vision/computed_per_image": images / wanted}


@pytest.mark.parametrize("name", ["idefics3", "llama4", "lfm2_vl", "qwen3"])
def test_other_families_are_left_alone(name):
    base = base_of(build(KNOWN[name]))
    assert why_not_once(base) == f"not tested with models of the type {base.config.model_type}"
