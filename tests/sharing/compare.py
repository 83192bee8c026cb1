"""Scoring, training and generating with one model, for the comparison of shared and plain passes."""

import inspect
from typing import Any

import pytest
import torch
from families import Batch
from transformers.models.qwen3_5 import modeling_qwen3_5


def with_head(model: Any) -> Any:
    """The model with TRL's head, which scores tokens without logits and wants a base model below it."""
    if getattr(model, "base_model", None) is model:
        return model
    pytest.importorskip("trl.trainer.utils").add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def checkpointed(model: Any, *options: dict[str, Any]) -> Any:
    """The model with gradient checkpointing on; transformers 5.20 has renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(*options)
    return model


def scored(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the completions, 0 where they are padding; (N, T) each."""
    ids, mask, length = batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.completion_length
    if getattr(model, "base_model", None) is model:
        logps = model(**batch.inputs).logits[:, -length - 1 : -1].log_softmax(-1) * mask[:, -length:, None]
        return logps.gather(-1, ids[:, -length:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-length] = -100
    outputs = model(**batch.inputs, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -length:], outputs.entropy[:, -length:]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """A sum with another weight for every token, so that no error cancels."""
    logps, _ = scored(model, batch)
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(5)).to(logps.device)
    return (logps * weights).sum() / logps.size(0)


def gradients(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradient of `loss_of` in every trained parameter; 0 where it does not arrive."""
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def largest_relative(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference in any parameter, relative to the largest entry of that parameter's gradient."""
    scale = max(value.abs().max() for value in some.values())
    return max(
        float((some[name] - others[name]).abs().max() / max(some[name].abs().max(), 1e-3 * scale)) for name in some
    )


def generated(model: Any, batch: Batch, *, sample: bool, **options: Any) -> torch.Tensor:
    """New tokens of every row, with the same random numbers at every call."""
    torch.manual_seed(11)
    inputs = batch.prompt_inputs()
    tokens = model.generate(**inputs, do_sample=sample, max_new_tokens=12, **options)
    return tokens[:, inputs["input_ids"].size(1) :]


def delta_rule_in_double(monkeypatch: Any) -> None:
    """Let the linear attention of Qwen3.5 keep float64; it computes in float32, in blocks, whatever it is given."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        rule = inspect.unwrap(getattr(modeling_qwen3_5, name))
        source = inspect.getsource(rule).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        names = dict(vars(modeling_qwen3_5))
        exec(source[source.index("def ") :], names)
        monkeypatch.setattr(modeling_qwen3_5, name, names[name])
