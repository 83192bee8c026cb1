"""Passes that benchmarks time: scoring, training and generation of one batch."""

import time
from typing import Any

import torch


def score(model: Any, batch: dict[str, torch.Tensor], completion: int, *, gradients: bool) -> None:
    """Log-probabilities of the completions, and their gradients if wanted."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :-completion] = -100
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        logps = model(**batch, labels=labels, fused_lm_head=True).log_probs
        if gradients:
            logps.sum().backward()


def switch_checkpointing_on(model: Any) -> None:
    """Without reentrant autograd; transformers 5.20 has renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def now(device: str) -> float:
    """Seconds, when all that was started on the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
