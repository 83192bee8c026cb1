"""Sampling in evaluations, where the options say that it differs from that in training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from vgr_trl.training.constructed import ConstructedTrainer


@contextmanager
def sampling_of_mode(trainer: ConstructedTrainer) -> Iterator[None]:
    """In this block completions are sampled as the mode at hand, training or evaluation, wants it."""
    args = trainer.args
    wanted = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if trainer.model.training or not wanted:
        yield
        return
    if trainer.use_vllm:
        kept = {name: getattr(trainer.vllm_generation, name) for name in wanted}
        for name, value in wanted.items():
            setattr(trainer.vllm_generation, name, value)
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(trainer.vllm_generation, name, value)
        return
    config, options = trainer.generation_config, trainer.generation_kwargs
    trainer.generation_kwargs = _changed(options, wanted)
    trainer.generation_config = GenerationConfig(**_changed(config.to_diff_dict(), wanted))
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = config, options


def _changed(options: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted.get("temperature") == 0:
        kept = ("temperature", "top_p", "top_k", "min_p", "do_sample")
        return {**{name: value for name, value in options.items() if name not in kept}, "do_sample": False}
    return {**options, **wanted}
