"""An update of TRL's trainer and of ours under each engine, in two processes on a CPU: the rows of docs/engines.md.

    PYTHONPATH=src:tests:tests/engines python -W ignore benchmarks/engine_traffic.py

Counted are the positions that pass through the decoder, and what the collectives of torch.distributed move: bytes of
whole tensors, per process, the output of a gather and the input of a reduction. Cases are those of the tests.
"""

import functools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from vgr_trl.demo.demo import FAMILIES
from vgr_trl.demo.tiny_model import build_tiny_vlm

NAMES = {
    "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "offload": "ZeRO-3, optimizer on the CPU", "fsdp2": "FSDP2",
}  # fmt: skip
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
        self.phase, self._inside = "start", False
        self.found: Counter = Counter()
        for kind, names in KINDS.items():
            for name in names:
                if hasattr(dist, name):  # by the release of torch
                    setattr(dist, name, self._counted(kind, getattr(dist, name)))
        # DeepSpeed takes it from there between coalescing managers.
        distributed_c10d.all_gather_into_tensor = dist.all_gather_into_tensor
        construct: Any = DistributedDataParallel.__init__

        @functools.wraps(construct)
        def construct_with_hook(ddp, *args, **kwargs):
            construct(ddp, *args, **kwargs)
            ddp.register_comm_hook(None, allreduce_hook)  # the reduction of C++, by `dist.all_reduce`

        setattr(DistributedDataParallel, "__init__", construct_with_hook)  # noqa: B010

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


class UpdatePhase(TrainerCallback):
    """Names the phase of each step: `update 1`, `update 2`."""

    def __init__(self, counter: CollectiveCounter) -> None:
        self.counter = counter

    def on_step_begin(self, args, state, control, **kwargs):
        self.counter.phase = f"update {state.global_step + 1}"

    def on_step_end(self, args, state, control, **kwargs):
        self.counter.phase = "between"


def count_in(kind: str, folder: Path, output: Path) -> None:
    """Run in each process of an engine: write what both trainers took in each case."""
    import as_trl_worker
    import engines

    counter = CollectiveCounter()
    engines.prepare(kind)
    taken: list[Counter] = []  # by the trainers, one after the other

    def watch(trainer: Any) -> None:
        prepare = trainer._prepare_inputs

        def prepare_in_phase(inputs):
            with counter.in_phase("rollout"):
                return prepare(inputs)

        trainer._prepare_inputs = prepare_in_phase
        trainer.add_callback(UpdatePhase(counter))
        counter.count_positions(next(m for m in trainer.model.modules() if type(m).__name__.endswith("TextModel")))
        counter.found = Counter()
        taken.append(counter.found)

    cases: list[dict] = []
    for case in as_trl_worker.compare(kind, folder, output, watch):
        cases.append(case | {"trl": taken[0], "ours": taken[-1]})
        if case["batch"] == 2 or case["budget"] is not None:
            taken.clear()
    if os.environ["RANK"] == "0":
        (output / f"{kind} counted.json").write_text(json.dumps(cases))


def ratio(case: dict, *counted: str) -> float:
    """Of the second update, ours to TRL's: in the first, DeepSpeed still records the order of modules."""
    ours, theirs = (sum(case[whose].get(f"update 2 {what}", 0) for what in counted) for whose in ("ours", "trl"))
    return ours / theirs


def main() -> None:
    import engines
    from support.launching import launch

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = [text for problem, answers in FAMILIES.values() for text in (problem, *answers)]
        model, processor = build_tiny_vlm([*words, "A. B. C. D."], hidden_size=32, num_layers=3, vision_depth=1)
        model.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
        for kind, name in NAMES.items():
            given = kind, folder / "model", folder
            launch(Path(__file__), *given, processes=2, engine=engines.as_if_large(kind, folder))
            cases = json.loads((folder / f"{kind} counted.json").read_text())
            cases.sort(key=lambda case: (case["lora"], case["batch"]))  # as in the page
            assert all(case["difference"] < 1e-4 for case in cases), cases
            shown = [case for case in cases if case["budget"] is None]
            figures = [(ratio(case, "positions"), ratio(case, "gathered bytes", "reduced bytes")) for case in shown]
            print(f"| {name} |", *(f"{positions:.2f}, {moved:.2f} |" for positions, moved in figures), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count_in(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
