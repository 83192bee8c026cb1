"""Sampling in evaluations, where the options say that it differs from that in training."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import GenerationConfig

from vgr_trl.replacing import replaced
from vgr_trl.training.constructed import ConstructedTrainer


@contextmanager
def sampling_of_mode(trainer: ConstructedTrainer) -> Iterator[None]:
    """In this block completions are sampled as the mode at hand, training or evaluation, wants it."""
    args = trainer.args
    given = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    wanted = {name: value for name, value in given.items() if value is not None}
    if trainer.model.training or not wanted:
        yield
        return
    with ExitStack() as stack:
        if trainer.use_vllm:
            for name, value in wanted.items():
                stack.enter_context(replaced(trainer.vllm_generation, name, value))
        else:
            stack.enter_context(sampled(trainer, wanted))
        yield


@contextmanager
def sampled(trainer: ConstructedTrainer, wanted: Mapping[str, float]) -> Iterator[None]:
    """In this block transformers samples with other values of its options; a temperature of 0 is greedy."""
    config = GenerationConfig(**_changed(trainer.generation_config.to_diff_dict(), wanted))
    options = _changed(trainer.generation_kwargs, wanted)
    with replaced(trainer, "generation_config", config), replaced(trainer, "generation_kwargs", options):
        yield


def _changed(options: dict[str, Any], wanted: Mapping[str, float]) -> dict[str, Any]:
    if wanted.get("temperature") == 0:
        kept = ("temperature", "top_p", "top_k", "min_p", "do_sample")
        return {**{name: value for name, value in options.items() if name not in kept}, "do_sample": False}
    return {**options, **wanted}
