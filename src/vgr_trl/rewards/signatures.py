"""Whether a reward function can be called with what TRL will pass, seen before anything is generated."""

import inspect
from collections.abc import Iterable
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards.accuracy import accuracy_reward, blind_accuracy_reward
from vgr_trl.rewards.whole_groups import WholeGroups, innermost

ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def reads_solution(reward: Any) -> bool:
    """Whether a reward compares an answer with what the data say is right."""
    return innermost(reward) in (accuracy_reward, blind_accuracy_reward)


def check_callable(reward: Any, columns: Iterable[str]) -> None:
    """Raise `RewardError` if calling `reward` with the data's columns must fail, or can only give None.

    Args:
        reward: a reward function; models are not looked at.
        columns: of the data, each of which is passed as a list.
    """
    columns = list(columns)
    missing = _missing(reward, columns)
    name = getattr(reward, "__name__", type(reward).__name__)
    if missing:
        raise RewardError(f"The reward {name} needs the column {missing!r}, but the data have {columns}: add it.")
    if isinstance(reward, WholeGroups) or not callable(reward) or hasattr(reward, "forward"):
        return
    passed = dict.fromkeys([*ALWAYS_PASSED, *(column for column in columns if column not in ("prompt", "completion"))])
    try:
        inspect.signature(reward).bind(**passed)
    except TypeError as error:
        raise RewardError(
            f"The reward {name} cannot be called with what is passed to it ({error}): take `completions`, the columns "
            f"that you use (of {columns}), and **kwargs."
        ) from error
    except ValueError:  # a built-in function without a signature
        return


def _missing(reward: Any, columns: list[str]) -> str | None:
    if reads_solution(reward) and not {"solution", "label_idx"} & set(columns):
        return "solution"
    if isinstance(reward, WholeGroups):
        return next((name for name in reward.required if name not in {*columns, *ALWAYS_PASSED}), None)
    return None
