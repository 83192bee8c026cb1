"""Training passes over what the loss reads, and over nothing else."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.errors import DataError
from vgr_trl.sharing import Place
from vgr_trl.sharing.backbone import base_of, causal_model
from vgr_trl.sharing.grouping import shuffle_by_group
from vgr_trl.sharing.image_inputs import is_image_token
from vgr_trl.skipping import (
    Extent,
    SkippingPlan,
    Window,
    deal_by_length,
    extents_of,
    find_text,
    find_window,
    live_tokens,
    narrowed,
    only_tokens,
    widened,
)
from vgr_trl.training.choice.replay import OLD_LOGPS, Replay
from vgr_trl.training.host import Host
from vgr_trl.training.passes.around import Passes
from vgr_trl.training.rollout import Rollout, TrainingPass

Scored = tuple[torch.Tensor, torch.Tensor | None, Any]


class LivePasses:
    """Runs the part of a micro-batch that has a gradient."""

    def __init__(
        self,
        plan: SkippingPlan,
        host: Host,
        replay: Replay | None,
        passes: Passes,
        place: Place,
    ) -> None:
        self.plan, self._host, self._replay = plan, host, replay
        self._passes, self._place = passes, place
        places = plan.rows, plan.tokens, plan.padding
        self._skips_rows, self._skips_tokens, self._skips_padding = (found.reason_off is None for found in places)

    def run(
        self,
        model: nn.Module,
        plain: Callable[..., Scored],
        inputs: dict[str, Any],
        batch_size: int | None,
        passed: TrainingPass | None,
    ) -> Scored:
        """Return what a pass with gradients gives for the live tokens of a micro-batch, and constants for the others.

        Those are the old log-probabilities, or 0, and an entropy of 0: with an advantage of 0 their loss is 0.

        Args:
            batch_size: this size, of passes that are not over the micro-batch.
            passed: the micro-batch; it learns which tokens are live, and what its first pass gives.
        """
        if passed is None or model is not passed.model:
            with self._passes.around(self._place, model, inputs["logits_to_keep"]):
                return plain(model, **inputs, batch_size=batch_size)
        live = self._live(passed.inputs)
        window = self._window(model, live, inputs)
        cut = live if self._skips_padding else None
        try:
            part = narrowed(inputs, window, cut)
        except DataError:  # whose pixels belong to which row is not known: none is left out
            window = replace(window, rows=list(range(len(live))))
            part = narrowed(inputs, window, cut)
        passed.live, passed.rows_run = live, len(window.rows)
        with (
            self._head(model, live[window.rows, : window.completion]),
            self._passes.around(self._place, model, window.completion, packs=self.plan.packing.reason_off is None),
        ):
            logps, entropies, aux_loss = plain(model, **part)
        logps = widened(logps, window, live, passed.inputs.get(OLD_LOGPS))
        if passed.logps is None:
            values = self._passes.values.take()
            complete_old_logps(passed.inputs, logps)
            passed.logps, passed.values = logps, None if values is None else widened(values, window, live, None)
            passed.hidden = self._passes.hidden.take()
            if self._replay is not None:
                self._replay.first_pass(passed)
        return logps, None if entropies is None else widened(entropies, window, live, None), aux_loss

    def _window(self, model: nn.Module, live: torch.Tensor, inputs: dict[str, Any]) -> Window:
        completion, multiple = inputs["logits_to_keep"], self._host.pad_to_multiple_of
        runs_images = self.plan.images and inputs.get("pixel_values") is not None
        if self._skips_rows and self._skips_padding and not runs_images and not live.any():
            is_image = is_image_token(inputs["input_ids"], causal_model(model).config)
            if (window := find_text(is_image, completion, multiple)) is not None:
                return window
        return find_window(
            live,
            inputs["attention_mask"][:, :-completion],
            inputs.get("num_images") if runs_images else None,
            rows=self._skips_rows,
            padding=self._skips_padding,
            multiple=multiple,
        )

    def gives_old_logps(self, rollout: Rollout) -> bool:
        """Whether what TRL scores of a rollout by the policy before its rewards comes from the first training pass."""
        return self.plan.old_logps.reason_off is None and self._host.mode == "train" and not rollout.judging

    def shuffle(self, by_group: bool) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Return what takes the place of TRL's `shuffle_sequence_dict`; None: nothing does.

        Args:
            by_group: whether the completions of a prompt are kept together where rows are not dealt by length.
        """
        if self.plan.dealing.reason_off is None:
            return self._dealt
        return shuffle_by_group if by_group else None

    def _dealt(self, batch: dict[str, Any]) -> dict[str, Any]:
        lengths = [extent.completion if extent.runs else 0 for extent in self.extents(batch)]
        return shuffle_by_group(batch, lambda order, groups: deal_by_length(order, groups, lengths, self.plan.window))

    def extents(self, batch: dict[str, Any]) -> list[Extent]:
        """Return what runs of each row of a batch of TRL."""
        return extents_of(self._live(batch), batch["prompt_mask"], rows=self._skips_rows, padding=self._skips_padding)

    def _live(self, batch: dict[str, Any]) -> torch.Tensor:
        mask = valid_tokens(batch)
        live = live_tokens(batch["advantages"], mask, rows=self._skips_rows, tokens=self._skips_tokens)
        read = None if self._replay is None else self._replay.rows_read(batch)
        return live if read is None else live | (mask.bool() & read.to(mask.device).unsqueeze(1))

    def _head(self, model: nn.Module, wanted: torch.Tensor) -> AbstractContextManager[None]:
        if not self.plan.head:
            return nullcontext()
        causal = causal_model(model)
        return only_tokens(causal, base_of(causal), wanted)


def complete_old_logps(inputs: dict[str, Any], logps: torch.Tensor) -> None:
    """Take the log-probabilities (N, T) of a first training pass for old ones that are NaN.

    TRL's `_compute_loss` reads the inputs only after its pass through the model, so what is completed here is what it
    divides by; `tests/credit/test_read_order.py` fails if that changes. Later iterations over the batch read it, too.
    """
    if (old := inputs.get(OLD_LOGPS)) is not None:
        inputs[OLD_LOGPS] = torch.where(old.isnan(), logps.detach(), old)
