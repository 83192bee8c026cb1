"""`--dry_run`: everything is loaded, a few prompts go through one step, and nothing stays on disk."""

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback

from vgr_trl.cli.run.describe import describe_run, print_plan
from vgr_trl.config import DAPOConfig
from vgr_trl.printable import printable
from vgr_trl.reporting.records.record import Completion
from vgr_trl.reporting.records.recorded_run import read_run
from vgr_trl.reporting.views.step_line import duration
from vgr_trl.trainer import DAPOTrainer

PROMPTS = 3
SHOWN = 300  # characters of a prompt or completion
QUANTITIES = ("vgr", "aei_vision", "mdi_balance")


@dataclass(frozen=True)
class Whole:
    """A run as its options say, beside which the dry run is a part.

    Attributes:
        completions: of a rollout, on all processes.
        per_step: completions that an optimizer step trains on.
        rows: of the data; None: a stream.
        max_steps: as the options say; 0 or less: epochs count.
        epochs: over the data.
        passes: optimizer steps of a rollout.
        prompts: of a rollout.
    """

    completions: int
    per_step: int
    rows: int | None
    max_steps: int
    epochs: float
    passes: float
    prompts: int

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None for a stream without `max_steps`."""
        if self.max_steps > 0:
            return self.max_steps
        return None if self.rows is None else int(self.epochs * (self.rows // self.prompts) * self.passes)


def dry_run(config: DAPOConfig, source: str, build: Callable[[], DAPOTrainer]) -> None:
    """Build a trainer, let it make one small step, and print what came out and what the whole run would take.

    Args:
        config: of the run; it is changed, so that the step is small and writes to a folder that is removed.
        build: makes the trainer from `config`.
    """
    with tempfile.TemporaryDirectory(prefix="vgr_trl_dry_run_") as folder, _small(config, folder) as sizes:
        trainer = build()
        rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
        whole = Whole(rows=rows, **sizes)
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.args.eval_strategy = "no"
        if trainer.accelerator.is_main_process:
            print_plan([row for row in describe_run(trainer, source, None) if row[0] not in _MISLEADING])
        started = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - started
        trainer.accelerator.wait_for_everyone()
        if not trainer.accelerator.is_main_process:
            return
        (record,) = read_run(folder).records("train")
        for line in [*shown(record.completions), *estimates(whole, config, seconds, _peak(), _row_bytes(trainer))]:
            print(line)


_MISLEADING = ("rollout", "step", "steps", "output")  # of the small step


@contextmanager
def _small(config: DAPOConfig, folder: str) -> Iterator[dict[str, Any]]:
    """Change the options to those of the small step; give the sizes of the whole run."""
    batch, group = config.per_device_train_batch_size * config.world_size, config.num_generations or 1
    accumulated, generated = config.gradient_accumulation_steps, config.steps_per_generation or 1
    sizes = {
        "completions": config.generation_batch_size or batch,
        "per_step": batch * accumulated,
        "max_steps": config.max_steps,
        "epochs": config.num_train_epochs,
        "passes": generated * config.num_iterations / accumulated,
        "prompts": config.prompts_per_rollout,
    }
    fitting = [parts for parts in range(1, generated + 1) if batch * parts % group == 0]
    enough = [parts for parts in fitting if batch * parts >= PROMPTS * group]
    parts = (enough or fitting[-1:] or [generated])[0]
    config.steps_per_generation = config.gradient_accumulation_steps = parts
    config.generation_batch_size = batch * parts
    config.num_iterations, config.max_steps = 1, 1
    config.output_dir, config.report_to, config.push_to_hub = folder, [], False
    config.save_strategy, config.load_best_model_at_end, config.logging_steps = "no", False, 1
    config.rollout_log_steps, config.rollout_log_samples = 1, 2 * PROMPTS
    config.markdown_logs = config.log_completions = config.colorize_output = False
    config.rollout_log_path = config.eval_log_path = None
    config.attention_diag_log_path = config.token_weights_log_path = None
    yield sizes


def shown(completions: Sequence[Completion]) -> list[str]:
    """Return the first completions of the first prompts, with what they earned and what was measured."""
    lines = []
    for group, members in groupby(completions, key=lambda completion: completion.group):
        of_prompt = list(members)
        first = of_prompt[0]
        images = ", ".join(f"{image.width}x{image.height} px" + _tokens(image.grid) for image in first.images)
        lines += ["", f"prompt {group + 1}: {images or 'no image'}; right: {first.solution}", _indented(first.prompt)]
        for completion in of_prompt:
            rewards = ", ".join(f"{name} {_number(value)}" for name, value in completion.rewards.items())
            lines += ["  completion", _indented(completion.text)]
            lines.append(
                f"    {rewards}; reward {_number(completion.reward)}; advantage {_number(completion.advantage)}"
            )
            if completion.metrics:
                lines.append(f"    {_signals(completion.metrics)}")
    return lines


def estimates(whole: Whole, config: DAPOConfig, seconds: float, peak: int, row_bytes: int) -> list[str]:
    """Return lines on the memory and the time of the whole run.

    Args:
        config: of the small step.
        seconds: of the small step, the first, in which kernels are chosen and memory is taken.
        peak: bytes of memory of this process at most, during the small step.
        row_bytes: keys and values of one completion of full length, of which a whole rollout holds more.
    """
    small = int(config.generation_batch_size or 1)
    more = max(whole.completions - small, 0) // config.world_size
    step = seconds * whole.per_step / small
    gib = 2**30
    lines = [
        "",
        f"measured: {small} completions of at most {config.max_completion_length} tokens in {seconds:.1f} s, "
        f"memory {peak / gib:.2f} GiB per process ({'GPU' if torch.cuda.is_available() else 'CPU'})",
        f"memory: about {(peak + more * row_bytes) / gib:.2f} GiB per process with the {whole.completions} completions "
        "of a whole rollout",
        f"time per step: at most about {duration(step)} ({whole.per_step} completions)",
    ]
    total = whole.steps
    return [*lines, f"total: at most about {duration(total * step)} for {total} steps" if total else "total: not known"]


def _peak() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _row_bytes(trainer: DAPOTrainer) -> int:
    """Bytes of the keys and values of a completion of full length, without its prompt, which may be shared."""
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(config.num_attention_heads, 1)
    width = torch.finfo(trainer.model.dtype).bits // 8
    return int(2 * config.num_hidden_layers * heads * size * width * (trainer.args.max_completion_length or 0))


def _signals(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    segment = "late" if "late" in metrics else "all"
    measured = metrics.get(segment, {})
    return f"{segment} layers: " + ", ".join(f"{name} {_number(measured.get(name))}" for name in QUANTITIES)


def _tokens(grid: tuple[int, int] | None) -> str:
    return "" if grid is None else f" ({grid[0]}x{grid[1]} tokens)"


def _indented(text: str) -> str:
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]} […]"
    return "\n".join(f"    {line}" for line in printable(cut).splitlines() or [""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
