"""Micro-batches in as many parts as a number of tokens needs, with the update of the whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.sharing.grouping import find_groups
from vgr_trl.skipping import Extent, pack_rows, take_rows, tokens_of
from vgr_trl.training.host import Host
from vgr_trl.training.passes.skip import LivePasses

_PER_WINDOW = ("dapo", "cispo", "vespo")  # TRL divides their sums by the tokens of the optimizer step
Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


class TokenBudget:
    """Computes losses of micro-batches part by part; gradients of all parts but the last are added on the way.

    Args:
        most: tokens of a part, `max_tokens_per_micro_batch`.
        shares: whether the prompt of a group is computed once.
    """

    def __init__(self, most: int, host: Host, passes: LivePasses, shares: bool) -> None:
        self.most, self._host, self._passes, self._shares = most, host, passes, shares

    def loss(self, model: nn.Module, inputs: dict[str, Any], compute: Loss) -> torch.Tensor:
        """Return the loss of a micro-batch, through which the gradient of its last part is still to come.

        Args:
            inputs: as TRL's `_compute_loss` takes them; what a pass adds to its part is added to them.
        """
        *parts, last = self._parts(inputs)
        before: torch.Tensor | float = 0.0
        for rows in parts:
            with self._accumulating(model):
                loss = self._loss_of(rows, model, inputs, compute)
                self._host.accelerator.backward(loss, **self._backward_options())
            before = before + loss.detach()
        return self._loss_of(last, model, inputs, compute) + before

    def scored_rows(self, batch_size: int, columns: int, completion: int, num_generations: int) -> int:
        """Return how many rows a pass without gradients takes, at most `batch_size`, whole groups if they fit.

        Args:
            columns: P + T.
            completion: T.
        """
        longest = torch.tensor([columns, completion], device=self._host.accelerator.device)
        columns, completion = self._host.accelerator.gather(longest).view(-1, 2).amax(0).tolist()
        if self._shares:
            of_group = columns + (num_generations - 1) * completion
            if (groups := self.most // of_group) > 0:
                return min(batch_size, groups * num_generations)
            return min(batch_size, max((self.most - columns) // completion + 1, 1))
        return min(batch_size, max(self.most // columns, 1))

    def _parts(self, inputs: dict[str, Any]) -> list[list[int]]:
        """Rows of each part, the same on every process: TRL gathers metrics of rows after each."""
        extents, count = self._passes.extents(inputs), len(inputs["prompt_ids"])
        groups = find_groups(inputs["prompt_ids"], inputs["prompt_mask"]) if self._shares else range(count)
        mine = [
            [extent.prompt, extent.completion, extent.runs, group]
            for extent, group in zip(extents, groups, strict=True)
        ]
        device = self._host.accelerator.device
        of_all = self._host.accelerator.gather(torch.tensor(mine, device=device)).view(-1, count, 4).tolist()
        processes = [([Extent(*row[:3]) for row in rows], [row[3] for row in rows]) for rows in of_all]
        return pack_rows(count, lambda rows: max(tokens_of(rows, *each) for each in processes), self.most)

    def _loss_of(self, rows: list[int], model: nn.Module, inputs: dict[str, Any], compute: Loss) -> torch.Tensor:
        every = len(inputs["prompt_ids"])
        if len(rows) == every:
            return compute(model, inputs)
        part = take_rows(inputs, rows)
        loss = compute(model, part)
        if (old := part.get("old_per_token_logps")) is not None:  # a first pass may have completed them
            inputs["old_per_token_logps"][rows] = old
        return loss * self._share(part, inputs)

    def _share(self, part: dict[str, Any], inputs: dict[str, Any]) -> float:
        """What the mean over a part counts in the mean over all of the micro-batch."""
        loss_type = self._host.args.loss_type
        if loss_type in _PER_WINDOW:
            return 1.0
        if loss_type == "bnpo":
            tokens, of_all = (float(valid_tokens(batch).sum().clamp(min=1)) for batch in (part, inputs))
            return tokens / of_all
        return len(part["prompt_ids"]) / len(inputs["prompt_ids"])

    @contextmanager
    def _accumulating(self, model: nn.Module) -> Iterator[None]:
        """No process waits for the gradients of another, and DeepSpeed makes no step."""
        state = self._host.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self._host.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)

    def _backward_options(self) -> dict[str, Any]:
        deepspeed = self._host.accelerator.distributed_type == DistributedType.DEEPSPEED
        return {"scale_wrt_gas": False} if deepspeed else {}
