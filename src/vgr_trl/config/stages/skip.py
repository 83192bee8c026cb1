"""Options of what is left out of the passes because it changes no parameter."""

from dataclasses import dataclass
from typing import Annotated

from vgr_trl.config.option import option
from vgr_trl.config.ranges import at_least, one_of

SWITCHES = (
    *("skip_dead_rows", "skip_dead_tokens", "skip_padding"),
    *("pack_completions", "deal_by_length", "reuse_first_pass"),
)
_AutoOrOff = Annotated[str, one_of("auto", "off")]


@dataclass
class SkipOptions:
    """What is left out of training passes because it has no gradient.

    Each is `auto`: on wherever nothing but rounding changes, with one line at the start that says where and why not
    elsewhere; or `off`.
    """

    skip_dead_rows: _AutoOrOff = option(
        "auto",
        "Leave completions without a gradient out of training passes. auto: wherever nothing else in the loss reads "
        "them; off.",
    )
    skip_dead_tokens: _AutoOrOff = option(
        "auto",
        "Leave tokens without a gradient out of the head in training passes. auto: wherever nothing else in the loss "
        "reads them; off.",
    )
    skip_padding: _AutoOrOff = option(
        "auto",
        "Cut training passes to the longest prompt and the last scored token of a micro-batch. auto: wherever "
        "positions do not count padding; off.",
    )

    pack_completions: _AutoOrOff = option(
        "auto",
        "Let completions of unequal length pass behind shared prompts in one row without padding, in training. auto: "
        "wherever attention is flash and positions do not count padding; off.",
    )
    deal_by_length: _AutoOrOff = option(
        "auto",
        "Deal the rows of an optimizer step to its micro-batches by length, groups together. auto: wherever the loss "
        "does not depend on which rows share a micro-batch; off.",
    )
    reuse_first_pass: _AutoOrOff = option(
        "auto",
        "Take old log-probabilities from the first training pass instead of a pass of their own. auto: wherever the "
        "policy has not changed in between and nothing reads them before; off.",
    )
    max_tokens_per_micro_batch: Annotated[int | None, at_least(1)] = option(
        None,
        "Run the rows of per_device_train_batch_size in as many parts as it takes for no pass of training or scoring "
        "to compute more tokens than this, padding included, as far as single rows allow; the update is the same. "
        "None: in one.",
    )
