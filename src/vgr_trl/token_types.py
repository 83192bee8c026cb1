"""Token types of prompts and completions; completions stay causal."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# In these families 0 opens a token to everything of that type, before and behind it; what is generated gets this one.
_CAUSAL_TYPE = {"paligemma": 1}


def causal_type(config: Any, name: str) -> int:
    """Return the token type under which the tokens of a completion see only what comes before them.

    Args:
        name: `token_type_ids` or `mm_token_type_ids`.
    """
    return _CAUSAL_TYPE.get(config.model_type, 0) if name == "token_type_ids" else 0


def extend_token_types(inputs: Mapping[str, torch.Tensor], config: Any, length: int) -> dict[str, torch.Tensor]:
    """Return token types of so many columns, P + T; where only prompts have some, completions stay causal."""
    types = {name: inputs[name] for name in TOKEN_TYPES if name in inputs}
    return {
        name: pad(value, (0, length - value.size(1)), value=causal_type(config, name)) for name, value in types.items()
    }
