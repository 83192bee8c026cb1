"""`vgr-trl train --dry_run`: a small step, its completions, and the time and memory of the whole run."""

import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from copy import copy

import torch
from transformers import PrinterCallback

from vgr_trl.cli.arguments import RunArguments
from vgr_trl.cli.plan import describe_run, print_plan, steps_per_rollout
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.reporting.console import format_duration, print_record
from vgr_trl.reporting.records import read_run
from vgr_trl.trainer import DAPOTrainer

DRY_RUN_PROMPTS = 3


def dry_run(config: DAPOConfig, source: str, build: Callable[[], DAPOTrainer], how: RunArguments) -> None:
    """Run a small step, and print its completions and an estimate of the time and memory of the whole run.

    Args:
        config: options of the run; changed in place so that the step is small and writes to a temporary folder.
        source: data source, as text.
        build: makes the trainer from `config`.
        how: flags of the command; `verbose` and `recipe` are read.
    """
    whole = copy(config)
    with tempfile.TemporaryDirectory(prefix="vgr_trl_dry_run_") as folder:
        _shrink_config(config, folder)
        trainer = build()
        trainer.remove_callback(PrinterCallback)
        trainer.args.eval_strategy = "no"
        if trainer.accelerator.is_main_process:
            print_plan(describe_run(trainer, source, None, how.verbose, how.recipe)[:-2])  # not its steps and output
        started = time.monotonic()
        trainer.train(resume_from_checkpoint=False)
        seconds = time.monotonic() - started
        trainer.accelerator.wait_for_everyone()
        if not trainer.accelerator.is_main_process:
            return
        (record,) = read_run(folder).records("train")
        print_record(record, prompt_length=300)
    for group, images in {each.group: each.images for each in record.completions}.items():
        sizes = [f"{each.width}x{each.height} px, {'x'.join(map(str, each.grid or '?'))} tokens" for each in images]
        print(f"prompt {group}: {'; '.join(sizes) or 'no image'}")
    per_step = whole.per_device_train_batch_size * whole.world_size * whole.gradient_accumulation_steps
    small, steps = int(config.generation_batch_size or 1), whole.max_steps
    if steps <= 0:
        rows = len(trainer.train_dataset)
        steps = int(whole.num_train_epochs * (rows // whole.prompts_per_rollout) * steps_per_rollout(whole))
    where, peak = "CPU", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_available():
        memory = trainer.rows_per_pass.memory  # has reset the peak
        where, peak = "GPU", max(torch.cuda.max_memory_allocated(), 0 if memory is None else memory.peak)
    # An upper bound: the first step also selects kernels and allocates memory.
    print(f"measured: {small} completions of at most {config.max_completion_length} tokens in {seconds:.1f} s, "
          f"memory {peak / 2**30:.2f} GiB per process ({where})\n"
          f"total: at most about {format_duration(steps * per_step * seconds / small)} for {steps} steps of {per_step} "
          "completions")  # fmt: skip


def _shrink_config(config: DAPOConfig, folder: str) -> None:
    """Reduce the options to a single step with a few whole groups that writes only to `folder`."""
    batch, group = config.per_device_train_batch_size * config.world_size, config.num_generations or 1
    whole = math.lcm(batch, group)  # the fewest completions that are whole groups
    parts = min(math.ceil(DRY_RUN_PROMPTS * group / whole) * whole // batch, config.steps_per_generation or 1)
    config.steps_per_generation = config.gradient_accumulation_steps = parts
    config.generation_batch_size = batch * parts
    config.num_iterations, config.max_steps = 1, 1
    config.output_dir, config.report_to, config.push_to_hub = folder, [], False
    config.save_strategy, config.load_best_model_at_end, config.logging_steps = "no", False, 1
    config.rollout_log_steps, config.rollout_log_samples = 1, 2 * DRY_RUN_PROMPTS
    config.markdown_logs = config.log_completions = config.colorize_output = False
    config.rollout_log_path = config.eval_log_path = None
    config.attention_diag_log_path = config.token_weights_log_path = None
