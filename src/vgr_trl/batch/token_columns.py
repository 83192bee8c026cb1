"""What TRL's loss reads per row of a rollout batch: along which tokens each tensor lies, and what pads it.

The names are those of the batch that TRL 1.16 trains on. The signals of a rollout travel in the same form, under names
that begin with `signals.`, so that one way of cutting and padding serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from vgr_trl.batch.inputs import TOKEN_TYPES
from vgr_trl.batch.signals import AttentionMass, RolloutSignals
from vgr_trl.errors import DataError

PAD_TOKEN = None  # padding of token ids: the tokenizer's pad token
# In these families 0 opens a token to everything of that type, before and behind it; what is generated gets this one.
_CAUSAL_TYPE = {"paligemma": 1}


@dataclass(frozen=True)
class Column:
    """A tensor whose last dimension lies along the tokens of a row.

    Attributes:
        along: `prompt` (P, padded on the left), `completion` (T, padded on the right) or `sequence` (P + T, both).
        padding: value in the padding.
        missing: value for rows from a batch that did not have the column; None: those rows cannot be without it.
        may_be_single: the tensor may be (N, 1) instead, one value per row.
    """

    along: Literal["prompt", "completion", "sequence"]
    padding: float | None = 0
    missing: float | None = None
    may_be_single: bool = False


TOKEN_COLUMNS = {
    "prompt_ids": Column("prompt", padding=PAD_TOKEN),
    "prompt_mask": Column("prompt"),
    "completion_ids": Column("completion", padding=PAD_TOKEN),
    "completion_mask": Column("completion"),
    "tool_mask": Column("completion", padding=1, missing=1),
    # TRL leaves them out while they equal those of the training pass; NaN says that they are to be taken from there.
    "old_per_token_logps": Column("completion", missing=float("nan")),
    "ref_per_token_logps": Column("completion"),
    "reference_hidden": Column("completion"),  # (N, D, T)
    "sampling_per_token_logps": Column("completion"),
    "importance_sampling_ratio": Column("completion", padding=1, may_be_single=True),
    "token_type_ids": Column("sequence", missing=0),
    "mm_token_type_ids": Column("sequence", missing=0),
    "values": Column("completion"),
    "returns": Column("completion"),
    "token_advantages": Column("completion"),
    "signals.logps": Column("completion"),
    "signals.entropies": Column("completion"),
    "signals.mask": Column("completion"),
    "signals.similarity": Column("completion"),
    "signals.dependency": Column("completion"),
    "signals.jsd": Column("completion"),
    "signals.perturbed_entropies": Column("completion"),
    "signals.attention.vision": Column("completion"),  # (N, L, T)
    "signals.attention.instruction": Column("completion"),  # (N, L, T)
    "signals.attention.region": Column("completion"),  # (N, L, T)
    "signals.attention.mask": Column("completion"),
}
VIEWS = "signals.views."  # before the names of perturbations
EXTRA = "signals.extra."  # before the names of signals (N, T) that were asked for by name
LAYERED = ("signals.attention.vision", "signals.attention.instruction", "signals.attention.region")


def token_column(name: str) -> Column | None:
    """Return how the column of that name lies along tokens, None if it does not."""
    return Column("completion", padding=float("nan")) if name.startswith((VIEWS, EXTRA)) else TOKEN_COLUMNS.get(name)


def columns_of_signals(signals: RolloutSignals | None) -> dict[str, torch.Tensor]:
    """Return the tensors of `signals`, rows first: (N, T), (N, L, T) and (N,)."""
    if signals is None:
        return {}
    parts = {
        f"signals.{name}": value for name, value in vars(signals).items() if name not in ("attention", "views", "extra")
    }
    parts |= {f"{VIEWS}{name}": value for name, value in signals.views.items()}
    parts |= {f"{EXTRA}{name}": value for name, value in signals.extra.items()}
    if signals.attention is not None:
        parts |= {f"signals.attention.{name}": value for name, value in vars(signals.attention).items()}
    return {
        name: value.transpose(0, 1) if name in LAYERED else value for name, value in parts.items() if value is not None
    }


def signals_of_columns(columns: dict[str, Any]) -> RolloutSignals | None:
    """Return the signals that `columns_of_signals` made columns of; None if there are none among `columns`."""
    given = {
        name.removeprefix("signals."): value.transpose(0, 1) if name in LAYERED else value
        for name, value in columns.items()
        if name.startswith("signals.")
    }
    if not given:
        return None
    mass: Any = {part.name: given.get(f"attention.{part.name}") for part in fields(AttentionMass)}
    rest: Any = {part.name: given.get(part.name) for part in fields(RolloutSignals)}
    rest["views"] = {name.removeprefix(VIEWS): value for name, value in columns.items() if name.startswith(VIEWS)}
    rest["extra"] = {name.removeprefix(EXTRA): value for name, value in columns.items() if name.startswith(EXTRA)}
    rest["attention"] = AttentionMass(**mass) if mass["mask"] is not None else None
    return RolloutSignals(**rest)


def map_signals(parts: Sequence[RolloutSignals], make: Callable[[list[torch.Tensor]], torch.Tensor]) -> RolloutSignals:
    """Return the signals whose tensors, rows first, `make` makes of those of parts in which the same was measured."""
    columns = [columns_of_signals(part) for part in parts]
    made = signals_of_columns({name: make([each[name] for each in columns]) for name in columns[0]})
    assert made is not None
    return made


def causal_type(config: Any, name: str) -> int:
    """Return the token type under which the tokens of a completion see only what comes before them.

    Args:
        name: `token_type_ids` or `mm_token_type_ids`.
    """
    return _CAUSAL_TYPE.get(config.model_type, 0) if name == "token_type_ids" else 0


def with_completion_types(
    inputs: Mapping[str, torch.Tensor], config: Any, count: int, prompt_length: int, completion_length: int
) -> dict[str, torch.Tensor]:
    """Return token types (N, P + T); where only prompts have some, completions get the one that keeps them causal."""
    types = {name: inputs[name] for name in TOKEN_TYPES if name in inputs}
    columns = prompt_length + completion_length
    for name, value in types.items():
        if value.ndim != 2 or len(value) != count or value.size(1) not in (prompt_length, columns):
            raise DataError(
                f"{name} has the shape {tuple(value.shape)}: give {(count, prompt_length)}, for the "
                f"prompts, or {(count, columns)}."
            )
    return {
        name: torch.nn.functional.pad(value, (0, columns - value.size(1)), value=causal_type(config, name))
        for name, value in types.items()
    }
