"""One of two processes over gloo: steps of `DAPOTrainer`, which shares prompts and leaves rows out, against TRL's."""

import gc
import sys

import torch
from support.steps import relative_difference, reports_by_place, uneven_reward
from support.trainers import logged
from text_runs import START, train, weights_of

KIND = sys.argv[1]  # ddp, or zero2 and zero3 in the environment of accelerate launch
CASES = {
    # One group to a process in every micro-batch: one of the two has no variance, or both.
    "a group without variance": {"num_iterations": 2},
    "straddling": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "credit": True},
    "checkpointing": {"loss_type": "grpo", "gradient_checkpointing": True, "credit": True},
    # With half of these micro-batches, steps of TRL's trainer under DDP and ZeRO-3 differ by 9e-6 themselves.
    "parts": {
        "loss_type": "grpo", "num_iterations": 2, "reward": uneven_reward, "learning_rate": 1.0,
        "gradient_accumulation_steps": 4,
    },
    "a reference": {"beta": 0.1, "num_iterations": 2, "reward": uneven_reward, "learning_rate": 1.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "reward": uneven_reward},
}  # fmt: skip


def whole(trainer):
    """The model with the whole of its parameters, which ZeRO-3 has in pieces."""
    if KIND == "zero3":
        from deepspeed import zero

        model = trainer.accelerator.unwrap_model(trainer.model)
        with zero.GatheredParameters(list(model.parameters())):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return weights_of(trainer)


def run() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    device = {} if KIND == "ddp" else {"use_cpu": False, "ddp_backend": "gloo"}  # DeepSpeed chooses it itself
    for name, case in CASES.items():
        budget = {"max_tokens_per_micro_batch": 28} if name == "parts" else {}
        stock = train(True, **case, **device)
        with reports_by_place() as places:
            ours = train(False, **case, **device, **budget)
        assert stock.accelerator.num_processes == 2
        difference = relative_difference(START, whole(ours), whole(stock))
        assert difference < 1e-5, (name, difference)
        assert places["generation"].prompts_per_row == (1 / 3 if name == "straddling" else 1 / 4)
        assert places["training"].prompts_per_row < 1 / 2 or name not in ("a reference", "cispo")
        skipped = logged(ours, "skipped/rows")
        assert "reward" in case or min(skipped) > 0, skipped


if __name__ == "__main__":
    run()
