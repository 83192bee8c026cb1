from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from vgr_trl.generation import eval_sampling
from vgr_trl.patches.trl import override_sampling

KEPT = {"max_new_tokens": 7, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 5}
GREEDY = {"max_new_tokens": 7, "do_sample": False}


def made(training, temperature=None, top_p=None, use_vllm=False):
    return SimpleNamespace(
        args=SimpleNamespace(eval_temperature=temperature, eval_top_p=top_p), model=SimpleNamespace(training=training),
        use_vllm=use_vllm, vllm_generation=SimpleNamespace(temperature=1.0, top_p=1.0),
        generation_config=GenerationConfig(**KEPT, disable_compile=True), generation_kwargs=dict(KEPT),
    )  # fmt: skip


@pytest.mark.parametrize(("temperature", "expected"), [(0.6, KEPT | {"temperature": 0.6, "top_p": 0.95}), (0, GREEDY)])
def test_an_evaluation_samples_as_its_options_say_and_training_as_before(temperature, expected):
    trainer = made(training=False, temperature=temperature, top_p=0.95)
    before = trainer.generation_config
    with override_sampling(trainer, eval_sampling(trainer.args, trainer.model.training)):
        assert trainer.generation_kwargs == expected
        found = trainer.generation_config
        assert {name: getattr(found, name) for name in expected} == expected
        assert found.disable_compile
    assert trainer.generation_config is before
    assert trainer.generation_kwargs == KEPT
    for same in (made(training=True, temperature=0.6), made(training=False)):
        before = same.generation_config
        with override_sampling(same, eval_sampling(same.args, same.model.training)):
            assert same.generation_config is before


def test_vllm_gets_the_same():
    trainer = made(training=False, temperature=0.6, use_vllm=True)
    with override_sampling(trainer, eval_sampling(trainer.args, trainer.model.training)):
        assert vars(trainer.vllm_generation) == {"temperature": 0.6, "top_p": 1.0}
    assert vars(trainer.vllm_generation) == {"temperature": 1.0, "top_p": 1.0}
