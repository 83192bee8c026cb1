"""Sampling of evaluations, with what TRL's trainer keeps for its generation."""

from types import SimpleNamespace

from transformers import GenerationConfig

from vgr_trl.generation import eval_sampling
from vgr_trl.patches.trl import override_sampling

KEPT = {"max_new_tokens": 7, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 5}


def made(training, temperature=None, top_p=None, use_vllm=False):
    return SimpleNamespace(
        args=SimpleNamespace(eval_temperature=temperature, eval_top_p=top_p),
        model=SimpleNamespace(training=training),
        use_vllm=use_vllm,
        vllm_generation=SimpleNamespace(temperature=1.0, top_p=1.0),
        generation_config=GenerationConfig(**KEPT, disable_compile=True),
        generation_kwargs=dict(KEPT),
    )


def test_an_evaluation_samples_as_its_options_say_and_training_as_before():
    trainer = made(training=False, temperature=0.6, top_p=0.95)
    before = trainer.generation_config
    with override_sampling(trainer, eval_sampling(trainer)):
        assert trainer.generation_kwargs == {**KEPT, "temperature": 0.6, "top_p": 0.95}
        found = trainer.generation_config
        assert (found.temperature, found.top_p, found.top_k, found.max_new_tokens) == (0.6, 0.95, 5, 7)
        assert found.disable_compile
    assert trainer.generation_config is before
    assert trainer.generation_kwargs == KEPT
    for same in (made(training=True, temperature=0.6), made(training=False)):
        before = same.generation_config
        with override_sampling(same, eval_sampling(same)):
            assert same.generation_config is before


def test_vllm_gets_the_same_and_temperature_0_is_greedy():
    trainer = made(training=False, temperature=0.0, top_p=0.5)
    with override_sampling(trainer, eval_sampling(trainer)):
        assert trainer.generation_kwargs == {"max_new_tokens": 7, "do_sample": False}
        assert trainer.generation_config.do_sample is False
    trainer = made(training=False, temperature=0.6, use_vllm=True)
    with override_sampling(trainer, eval_sampling(trainer)):
        assert vars(trainer.vllm_generation) == {"temperature": 0.6, "top_p": 1.0}
    assert vars(trainer.vllm_generation) == {"temperature": 1.0, "top_p": 1.0}
