"""verl's forward passes of Qwen-VL hand a cache on to the language model, but do not name it among their parameters.

Where rows have no images they pass a made-up one through the tower, and cannot read what comes out with transformers
5.10; completions behind a prompt need none.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import base_of, causal_model


@contextmanager
def naming_its_cache(model: Any) -> Iterator[None]:
    """Give the base model a forward pass that names `past_key_values`, so that prompts can be computed once."""
    base = base_of(causal_model(model))
    plain = base.forward
    parameters = inspect.signature(plain).parameters
    takes_more = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if "past_key_values" in parameters or not takes_more:
        yield
        return

    def forward(
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        **others: Any,
    ) -> Any:
        given = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "pixel_values": pixel_values,
            "image_grid_thw": image_grid_thw,
        }
        given = {name: value for name, value in given.items() if value is not None} | others
        if past_key_values is not None and pixel_values is None:
            return base.language_model(inputs_embeds=base.get_input_embeddings()(input_ids), **given)
        return plain(input_ids, **given)

    with replaced(base, "forward", forward):
        yield
