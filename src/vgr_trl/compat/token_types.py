"""Token types of completions, where prompts have some: they must not let a completion see what comes after it."""

from collections.abc import Mapping
from typing import Any

import torch

# In these families 0 opens a token to everything of that type, before and behind it; what is generated gets this one.
_CAUSAL_TYPE = {"paligemma": 1}


def causal_type(config: Any, name: str) -> int:
    """Return the token type under which the tokens of a completion see only what comes before them.

    Args:
        config: of a transformers model.
        name: `token_type_ids` or `mm_token_type_ids`.
    """
    return _CAUSAL_TYPE.get(config.model_type, 0) if name == "token_type_ids" else 0


def with_causal_completions(inputs: Mapping[str, Any], config: Any, completion_length: int) -> dict[str, Any]:
    """Return inputs of a pass whose token types (N, P + T) are `causal_type` in the completions.

    TRL pads them with 0 there, which in PaliGemma lets completions see their own future.

    Args:
        inputs: by name; those without token types are returned as they are.
        config: of the model they are for.
        completion_length: T.
    """
    changed = dict(inputs)
    value = changed.get("token_type_ids")
    if value is not None and (kind := causal_type(config, "token_type_ids")):
        completions = value.new_full((len(value), completion_length), kind)
        changed["token_type_ids"] = torch.cat([value[:, :-completion_length], completions], dim=1)
    return changed
