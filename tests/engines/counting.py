"""Count what the collectives of torch.distributed move, and the positions that pass through the decoder.

Bytes are those of whole tensors, per process: the output of a gather, the input of a reduction.
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

KINDS = {
    "gathered": ("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "_broadcast_coalesced"),
    "reduced": ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
}


def bytes_of(given: object) -> int:
    """Bytes of the tensors in the arguments of a collective."""
    if isinstance(given, torch.Tensor):
        return given.nbytes
    return sum(map(bytes_of, given)) if isinstance(given, (list, tuple)) else 0


class CollectiveCounter:
    """Counts calls and bytes by kind, in phases: `phase` prefixes their names, such as "update gathered bytes".

    Two kinds are left out. Objects (`all_gather_object`) call the collectives inside torch's own module, which is not
    wrapped. Accelerate gathers metrics and the agreements of processes, so its module is the caller then. DTensor's own
    operators reduce the norm of FSDP2's gradients; they are not wrapped either.
    """

    def __init__(self) -> None:
        self.phase, self.found, self._inside = "start", Counter(), False
        for kind, names in KINDS.items():
            for name in names:
                if hasattr(dist, name):  # by the release of torch
                    setattr(dist, name, self._counted(kind, getattr(dist, name)))
        # DeepSpeed takes it from there between coalescing managers.
        distributed_c10d.all_gather_into_tensor = dist.all_gather_into_tensor
        construct = DistributedDataParallel.__init__

        @functools.wraps(construct)
        def construct_with_hook(ddp, *args, **kwargs):
            construct(ddp, *args, **kwargs)
            ddp.register_comm_hook(None, allreduce_hook)  # the reduction of C++, by `dist.all_reduce`

        DistributedDataParallel.__init__ = construct_with_hook

    def _counted(self, kind: str, collective):
        @functools.wraps(collective)
        def count(*args, **kwargs):
            caller = sys._getframe(1).f_globals["__name__"]
            if not (self._inside or caller.startswith("accelerate.")):
                tensors = [given for given in (*args, *kwargs.values()) if bytes_of(given)]
                self.found[f"{self.phase} {kind} calls"] += 1
                self.found[f"{self.phase} {kind} bytes"] += max(map(bytes_of, tensors), default=0)
            inside, self._inside = self._inside, True
            try:
                return collective(*args, **kwargs)
            finally:
                self._inside = inside

        return count

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Count what this block does as of a phase."""
        before, self.phase = self.phase, name
        try:
            yield
        finally:
            self.phase = before

    def count_positions(self, language_model: torch.nn.Module) -> None:
        """Count passes through a language model and their positions; a recompute is none."""

        def count(module, args, kwargs):
            shape = (kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]).shape
            self.found[f"{self.phase} passes"] += 1
            self.found[f"{self.phase} positions"] += shape[0] * shape[1]

        language_model.register_forward_pre_hook(count, with_kwargs=True)
