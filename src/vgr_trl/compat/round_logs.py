"""What TRL logs of a rollout batch, where further rounds of prompts belong to the same batch."""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl import GRPOTrainer

_EXTREMES = {"min": min, "max": max}


def merge_rounds(metrics: dict[str, list[float]], before: dict[str, int], completions: list[int]) -> None:
    """Make one entry of what was logged for the batch and for each further round, in place.

    Means are weighted by completions; of smallest and largest values the smallest and the largest is kept.

    Args:
        metrics: name -> values since they were last logged.
        before: name -> how many values there were before the first further round.
        completions: on a process, of the batch and of each further round.
    """
    for name, values in metrics.items():
        rounds = len(values) - before.get(name, 0)
        if rounds == len(completions) - 1 > 0 and before.get(name):
            newest = [values.pop() for _ in completions][::-1]
            known = [(value, count) for value, count in zip(newest, completions, strict=True) if value == value]
            values.append(_merged(name, known) if known else float("nan"))


def _merged(name: str, values: list[tuple[float, int]]) -> float:
    extreme = re.search(r"(?:^|[/_])(min|max)(?:[/_]|$)", name)
    if extreme is not None:
        return _EXTREMES[extreme[1]](value for value, _ in values)
    return sum(value * count for value, count in values) / sum(count for _, count in values)


def replace_newest(values: deque[Any], newest: list[Any]) -> None:
    """Put `newest` in the place of the last values of a column, as many."""
    for _ in newest:
        values.pop()
    values.extend(newest)


def let_tables_hold(logs: dict[str, Any], count: int) -> None:
    """Make room for `count` rows in the table of completions, in place; TRL's holds one rollout batch."""
    for name, values in logs.items():
        if isinstance(values, deque):
            logs[name] = deque(values, maxlen=count)
        else:
            logs[name] = defaultdict(lambda: deque(maxlen=count), values)


def keep_newest(logs: dict[str, Any], count: int) -> None:
    """Drop all but the last `count` rows of the table of completions, in place: those of earlier rollouts."""
    for values in logs.values():
        for column in [values] if isinstance(values, deque) else values.values():
            while len(column) > count:
                column.popleft()


@contextmanager
def as_one_batch(trainer: GRPOTrainer, completions: int) -> Iterator[list[int]]:
    """Let what TRL logs of rollout batches generated in this block belong to the one before it.

    Args:
        completions: of that batch, on this process.

    Yields:
        Completions of a process in that batch, and in each further one, for which the block adds an entry.
    """
    metrics = trainer._metrics["train"]
    logged = {name: len(values) for name, values in metrics.items()}
    keep_newest(trainer._logs, completions * trainer.accelerator.num_processes)
    rounds = [completions]
    yield rounds
    merge_rounds(metrics, logged, rounds)


@contextmanager
def unlogged(trainer: GRPOTrainer) -> Iterator[None]:
    """Generate and reward in this block without a trace in metrics, tables and counts."""
    logs = *trainer._metrics.values(), trainer._pending_extra_logs, trainer._pending_metrics
    before = [{name: list(values) for name, values in log.items()} for log in logs]
    tokens = trainer.state.num_input_tokens_seen
    try:
        yield
    finally:
        for log, kept in zip(logs, before, strict=True):
            log.clear()
            log.update(kept)
        trainer.state.num_input_tokens_seen = tokens
