"""Small trainers, built in one way by the tests and by the processes that they start."""

import copy
import gc
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from support.trl_head import replace_missing_head
from torch.distributed.tensor import DTensor
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
from trl import GRPOConfig, GRPOTrainer

from vgr_trl import trainer as trainer_module
from vgr_trl.batch import Batch
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.passes import run_pass
from vgr_trl.patching import patched_attribute
from vgr_trl.trainer import DAPOTrainer
from vgr_trl.trl_bridge import from_trl
from vgr_trl.views import perturbed_pass

OPTIONS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 8,
    "num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-3, "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
BIG_STEPS = {
    "learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 1e9, "lr_scheduler_type": "constant",
    "max_completion_length": 64,
}  # fmt: skip
OURS, STOCK = (DAPOTrainer, DAPOConfig), (GRPOTrainer, GRPOConfig)


def letters_reward(completions, **kwargs):
    """Many different values, so that no group is dead."""
    return [sum(map(ord, completion[0]["content"])) % 7 / 7 for completion in completions]


def config(output_dir, kind=DAPOConfig, **changed):
    """The options of a small run on a CPU of which nothing is kept."""
    ours = {"check_pixels": False} if kind is DAPOConfig else {}  # it makes passes of its own; tests count passes
    if ours and not changed.keys().isdisjoint({"use_vllm", "cache_implementation"}):
        ours["engine_distance_limit"] = None  # what stands in for vLLM returns any log-probabilities
    return kind(output_dir=str(output_dir), **OPTIONS | ours | changed)


def train_file(question_files):
    return question_files.split(",")[0].removeprefix("train=")


@cache
def prompts(file: str) -> Dataset:
    return prepare_rows(load_dataset("parquet", data_files=file, split="train"), system_prompt=None)[0]


@cache
def _loaded(folder: Path):
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)


def tiny_model(folder):
    return copy.deepcopy(_loaded(Path(folder)))


def vision_trainer(folder, rewards, config, rows, eval_rows=None, *, model=None, **more):
    model = tiny_model(folder) if model is None else model
    return DAPOTrainer(
        model, rewards, config, rows, eval_rows, processing_class=AutoProcessor.from_pretrained(folder), **more
    )


def moves(trainer, folder):
    before = [parameter.detach().flatten() for parameter in tiny_model(folder).parameters()]
    return weights(trainer) - torch.cat(before)


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def whole_parameters(trainer) -> dict[str, torch.Tensor]:
    """Copies of the parameters by name, whole in every process."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    named = dict(model.named_parameters())
    if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        from deepspeed import zero

        with zero.GatheredParameters(list(named.values())):
            return {name: value.detach().clone() for name, value in named.items()}
    parts = {name: value.detach() for name, value in named.items()}
    return {name: (part.full_tensor() if isinstance(part, DTensor) else part).clone() for name, part in parts.items()}


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def begin(trainer, rows=8):
    """What a rollout of so many completions is made of, four to a prompt, by a trainer that is made ready for it."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return [trainer.train_dataset[index // 4] for index in range(rows)]


def emitted(model, inputs, output="logits"):
    """What a plain pass over a rollout batch gives where completion tokens are emitted, (N, T, …)."""
    batch = inputs if isinstance(inputs, Batch) else from_trl(inputs)
    return getattr(model(**batch.model_inputs), output)[:, batch.width - 1 : -1]


@contextmanager
def scored_passes(trainer):
    """The log-probabilities of each pass over completions in this block, which keep their gradients."""
    found, plain = [], run_pass.run_pass

    def keep(*args, **kwargs):
        scores = plain(*args, **kwargs)
        found.append(scores.logps)
        found[-1].retain_grad()
        return scores

    of_loss = patched_attribute(trainer_module, "run_pass", keep)
    with of_loss, patched_attribute(perturbed_pass, "run_pass", keep):
        yield found


replace_missing_head()

# A trainer collects garbage when it starts; looking through all that is imported is half of a tiny training.
gc.freeze()
