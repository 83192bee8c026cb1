"""Token types of completions, where prompts have some: they must not let a completion see what comes after it."""

from collections.abc import Mapping
from typing import Any

import torch

from vgr_trl.batch.token_columns import causal_type


def with_causal_completions(inputs: Mapping[str, Any], config: Any, completion_length: int) -> dict[str, Any]:
    """Return inputs of a pass whose token types (N, P + T) are `causal_type` in the completions.

    TRL pads them with 0 there, which in PaliGemma lets completions see their own future.

    Args:
        inputs: by name; those without token types are returned as they are.
    """
    changed = dict(inputs)
    value = changed.get("token_type_ids")
    if value is not None and (kind := causal_type(config, "token_type_ids")):
        completions = value.new_full((len(value), completion_length), kind)
        changed["token_type_ids"] = torch.cat([value[:, :-completion_length], completions], dim=1)
    return changed
