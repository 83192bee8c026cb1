"""Operators that an update dispatches, by TRL's trainer and by ours: about the kernels that a GPU would launch.

    OMP_NUM_THREADS=1 python -W ignore benchmarks/launches.py

Counted are forward and backward of the training passes and the loss, without views, without rollout and optimizer: two
groups of 8, a Qwen2.5-VL of narrow layers on a CPU, the mean of two steps. Writes `results/launches.md`.
"""

import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from machine import RESULTS, describe_machine, read_commit
from peft import LoraConfig
from sharing_models import ModelShape, Size, build_model, make_processor, make_question
from stage_passes import LORA
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOConfig, GRPOTrainer

from vgr_trl import DAPOConfig, DAPOTrainer

SHAPE = ModelShape(64, 28, 4, 2, 128, 1024, 32, 4, 64, 2, (3,))
SIZE = Size(32, 16, 16, 8)
GROUPS, STEPS = 2, 2
# Operators that launch nothing: views, allocations, and reads by the host.
_NO_KERNEL = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "reshape", "_reshape_alias", "unfold"),
    *("chunk", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    "_local_scalar_dense",
}  # fmt: skip
ROWS = (  # of the table: name, whether ours, completions in a micro-batch
    ("TRL, micro-batch 8", False, 8),
    ("TRL, micro-batch 16", False, 16),
    ("vgr_trl, micro-batch 8", True, 8),
    ("vgr_trl, micro-batch 16", True, 16),
)
COLUMNS = {  # options of `count_operators`
    "all weights": {},
    "LoRA": {"adapters": True},
    "LoRA, checkpointing": {"adapters": True, "checkpointing": True},
}


class DispatchCounter(TorchDispatchMode):
    """Counts the operators that are dispatched while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        """Operators, but for those that launch nothing."""
        return sum(count for name, count in self.counts.items() if name not in _NO_KERNEL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts while `call` runs."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return call(*args, **kwargs)

        return counted

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does not count while `call` runs, which a counted function calls."""

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            self.__exit__(None, None, None)
            try:
                return call(*args, **kwargs)
            finally:
                self.__enter__()

        return uncounted


def count_operators(
    ours: bool,
    rows: int,
    *,
    adapters: bool = False,
    checkpointing: bool = False,
    layers: int = SHAPE.layers,
    autocast: bool = False,
) -> int:
    """Count the operators of an update, the mean of two.

    Args:
        ours: `DAPOTrainer`; otherwise TRL's `GRPOTrainer`.
        rows: completions in a micro-batch.
        adapters: LoRA on the language model.
        checkpointing: without reentrant autograd.
        layers: of the language model.
        autocast: weights in bfloat16, adapters in float32, under bfloat16 autocast; otherwise all in float32.
    """
    processor, dtype = make_processor(), "bfloat16" if autocast else "float32"
    shape = replace(SHAPE, layers=layers)
    model = build_model(shape, processor.tokenizer, device="cpu", dtype=dtype, attention="sdpa")
    kinds: tuple[Any, Any] = (DAPOTrainer, DAPOConfig) if ours else (GRPOTrainer, GRPOConfig)
    more = {} if ours else {"loss_type": "dapo", "epsilon_high": 0.28}
    with tempfile.TemporaryDirectory() as folder:
        args = kinds[1](
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=GROUPS * SIZE.generations // rows,
            num_generations=SIZE.generations,
            max_completion_length=SIZE.completion,
            beta=0.0,
            use_cpu=True,
            bf16=autocast,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            **more,
        )
        trainer = kinds[0](
            model=model,
            reward_funcs=_reward,
            args=args,
            train_dataset=Dataset.from_list([make_question(SIZE, processor, seed) for seed in range(GROUPS * STEPS)]),
            processing_class=processor,
            peft_config=LoraConfig(r=4, target_modules=LORA) if adapters else None,
        )
        counter = DispatchCounter()
        trainer._generate_and_score_completions = counter.outside(trainer._generate_and_score_completions)
        trainer.training_step = counter.around(trainer.training_step)
        trainer.train()
    return counter.launches // STEPS


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return another value for nearly every completion."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def whole_table() -> Iterator[str]:
    """Yield the lines of the table of an update."""
    yield f"| operators of an update | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * len(COLUMNS)
    for name, ours, rows in ROWS:
        counts = [count_operators(ours, rows, **options) for options in COLUMNS.values()]
        yield f"| {name} | {' | '.join(f'{count:,}' for count in counts)} |"


def layer_table() -> Iterator[str]:
    """Yield the lines of the table of a layer: half the difference of models with four layers and two."""
    columns = {name: options for name, options in COLUMNS.items() if options}
    yield f"| operators of a layer, bfloat16 autocast | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for name, ours, rows in ROWS:
        cells = []
        for options in columns.values():
            four, two = (count_operators(ours, rows, layers=layers, autocast=True, **options) for layers in (4, 2))
            cells.append(f"{(four - two) / 2:,.0f}")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    command = shlex.join(["python", "-W", "ignore", "benchmarks/launches.py", *sys.argv[1:]])
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(1).items())
    lines = [
        "# Operators that an update dispatches",
        "",
        "Where a GPU waits for the host, operators cost more than arithmetic. PyTorch counts them on a CPU,",
        "views left out: training passes, loss and backward pass of two groups of 8 completions; a Qwen2.5-VL of 28",
        "narrow layers, `sdpa`, float32, default options. Rollout and optimizer are left out. vgr_trl joins two",
        "micro-batches of 8 into one pass.",
        "",
        *whole_table(),
        "",
        "One layer with weights in bfloat16, adapters in float32 and bfloat16 autocast, which casts adapters in every",
        "layer and pass; vgr_trl casts them once per micro-batch.",
        "",
        *layer_table(),
        "",
        f"`{command}` at {read_commit()}: {machine}.",
        "",
    ]
    (RESULTS / "launches.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
