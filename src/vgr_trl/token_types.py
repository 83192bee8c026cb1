"""Token types of prompts and completions; completions stay causal."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# In these families tokens of type 0 attend to all tokens of type 0, also to later ones; completions get another type.
_CAUSAL_TYPE = {"paligemma": 1}


def causal_type(config: Any, name: str) -> int:
    """Return the token type that keeps the tokens of a completion causal.

    Args:
        config: configuration of the model.
        name: `token_type_ids` or `mm_token_type_ids`.
    """
    return _CAUSAL_TYPE.get(config.model_type, 0) if name == "token_type_ids" else 0


def extend_token_types(inputs: Mapping[str, torch.Tensor], config: Any, length: int) -> dict[str, torch.Tensor]:
    """Extend the token types of prompts to completions, which stay causal.

    Args:
        inputs: inputs of a forward pass, with token types (N, P) or (N, P + T), if any.
        config: configuration of the model.
        length: P + T.
    """
    types = {name: inputs[name] for name in TOKEN_TYPES if name in inputs}
    return {
        name: pad(value, (0, length - value.size(1)), value=causal_type(config, name)) for name, value in types.items()
    }
