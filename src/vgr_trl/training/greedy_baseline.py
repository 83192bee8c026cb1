"""The baseline of ReMax: what one greedy completion of each prompt earns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from vgr_trl.rewards.groups import WholeGroups
from vgr_trl.sampling import Placement


def greedy_baseline(trainer: Any, placement: Placement) -> torch.Tensor:
    """Return the reward of one greedy completion per prompt, (num_groups,), the same on every process.

    The process with a prompt's first completion generates it. Rewards that compare a group count as 0. Every process
    generates equally often and equally much; nothing of it is logged.

    Args:
        trainer: within a rollout, after its rewards.
        placement: of the rollout batch.
    """
    firsts = [
        [group for group in range(placement.num_groups) if placement.holder(group) == process]
        for process in range(placement.num_processes)
    ]
    most = max(map(len, firsts))
    mine = [group * placement.num_generations - placement.process_index * placement.rows
            for group in firsts[placement.process_index]]  # fmt: skip
    rows = mine + [0] * (most - len(mine))  # others generate too, so that all make the same collective calls
    inputs = [trainer._rollout_rows[row] for row in rows]
    prompts = [trainer._measurement.messages[row] for row in rows]
    with _unlogged(trainer), _greedy(trainer), _single(trainer), trainer._measurement.rollout():
        _, completion_ids, _, completions, *_ = trainer._generate(prompts)
        earned = trainer._calculate_rewards(inputs, prompts, completions, completion_ids)  # (num_processes * most, R)
    weights = trainer.reward_weights.to(earned.device)
    sums = (earned * weights).nansum(dim=1).view(placement.num_processes, most)
    return torch.cat([sums[process, : len(groups)] for process, groups in enumerate(firsts)])


@contextmanager
def _greedy(trainer: Any) -> Iterator[None]:
    before, kwargs = trainer.generation_config, trainer.generation_kwargs
    sampled = {"do_sample", "temperature", "top_p", "top_k", "min_p"}
    kept = {name: value for name, value in before.to_diff_dict().items() if name not in sampled}
    trainer.generation_config = GenerationConfig(**kept, do_sample=False)
    trainer.generation_kwargs = {name: value for name, value in kwargs.items() if name not in sampled} | {
        "do_sample": False
    }
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = before, kwargs


@contextmanager
def _single(trainer: Any) -> Iterator[None]:
    """Rewards that compare the completions of a prompt have nothing to compare: 0."""
    before = trainer.reward_funcs
    trainer.reward_funcs = [_zero if isinstance(reward, WholeGroups) else reward for reward in before]
    try:
        yield
    finally:
        trainer.reward_funcs = before


def _zero(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


@contextmanager
def _unlogged(trainer: Any) -> Iterator[None]:
    before = {name: list(values) for name, values in trainer._metrics["train"].items()}
    tokens, per_function = trainer.state.num_input_tokens_seen, trainer._rewards_per_func
    try:
        yield
    finally:
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(before)
        trainer.state.num_input_tokens_seen, trainer._rewards_per_func = tokens, per_function
        trainer._pending_extra_logs.clear()
        trainer._pending_metrics.clear()
