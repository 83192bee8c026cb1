"""Scoring, training and generating with one model, for the comparison of shared and plain passes."""

import inspect
from typing import Any

import pytest
import torch
from packaging.version import Version
from support.models.families import Batch
from support.old_releases import KEEPS_LESS, installed
from transformers.models.qwen3_5 import modeling_qwen3_5

from vgr_trl.sharing import SharingReport, share_prompts


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


def why_plain(model: Any, generates: bool = False) -> str | None:
    """Why the installed transformers has nothing to share for such a model; None from 5.18 on."""
    text = model.config.get_text_config(decoder=True)
    if text.model_type == "lfm2" and installed == Version("5.17") and model.config is not text:
        return "a row of prompts and completions changes its hidden states by 0.8 of their size"
    if not KEEPS_LESS:
        return None
    if getattr(text, "use_bidirectional_attention", None) == "vision" and not generates:
        return "images that see themselves in every layer"
    if {"linear_attention", "conv"} & set(getattr(text, "layer_types", None) or ()):
        return "layers of type LinearAttentionLayer"
    if getattr(text, "num_kv_shared_layers", None) == 0:
        return "a cache without layers"
    return None


def needs_shared(model: Any) -> None:
    if reason := why_plain(model):
        pytest.skip(f"plain passes: {reason}")


def assert_shared_by(report: SharingReport, prompts: int, rows: int, model: Any, generates: bool = False) -> None:
    """So many prompts passed for so many rows, or none is counted, for the reason that `why_plain` has."""
    reason = why_plain(model, generates)
    unshared = rows if reason and reason.startswith("images") else 0  # found in the batch, whose rows are counted
    expected = (prompts, rows, {}) if reason is None else (unshared, unshared, {reason: 1})
    assert (report.prompts, report.rows, dict(report.plain)) == expected


def scored(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask, length = batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.completion_length
    if getattr(model, "base_model", None) is model:
        logps = (
            model(**batch.inputs, use_cache=False).logits[:, -length - 1 : -1].log_softmax(-1) * mask[:, -length:, None]
        )
        return logps.gather(-1, ids[:, -length:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-length] = -100
    outputs = model(**batch.inputs, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -length:], outputs.entropy[:, -length:]


def plain_and_shared(model: Any, batch: Batch, length: int | None = 12) -> tuple[torch.Tensor, torch.Tensor, Any]:
    with torch.no_grad():
        plain, _ = scored(model, batch)
        with share_prompts(model, length) as report:
            shared, _ = scored(model, batch)
    return plain, shared, report


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """A sum with another weight for every token, so that no error cancels."""
    logps, _ = scored(model, batch)
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(5)).to(logps.device)
    return (logps * weights).sum() / logps.size(0)


def gradients(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
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
    torch.manual_seed(11)
    inputs = batch.prompt_inputs()
    tokens = model.generate(**inputs, do_sample=sample, max_new_tokens=12, **options)
    return tokens[:, inputs["input_ids"].size(1) :]


def assert_same_scores(model: Any, batch: Batch, length: int | None, most: float, shared_by: tuple[int, int]) -> None:
    """Log-probabilities and entropies differ by less than `most`; `shared_by`: prompts that passed for so many rows."""
    with torch.no_grad():
        plain = scored(model, batch)
        with share_prompts(model, length) as report:
            shared = scored(model, batch)
    assert_shared_by(report, *shared_by, model)
    for one, other in zip(plain, shared, strict=True):
        assert (one - other).abs().max() < most


def assert_same_gradients(model: Any, batch: Batch, most: float, checkpointing: bool = False) -> None:
    plain = gradients(model, batch)
    if checkpointing:
        checkpointed(model)
    with share_prompts(model, batch.completion_length) as report:
        shared = gradients(model, batch)
    assert_shared_by(report, 2, 6, model)
    assert largest_relative(plain, shared) < most
    if "pixel_values" in batch.inputs:
        assert any("vis" in parameter and float(gradient.abs().max()) > 0 for parameter, gradient in plain.items())


def assert_same_tokens(model: Any, batch: Batch, sample: bool) -> torch.Tensor:
    plain = generated(model, batch, sample=sample)
    with share_prompts(model) as report:
        shared = generated(model, batch, sample=sample)
    assert_shared_by(report, 2, 6, model, generates=True)
    assert torch.equal(plain, shared)
    return plain


def shortened(batch: Batch, length: int) -> Batch:
    per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
    end = length - batch.completion_length
    batch.inputs = {key: value[:, :end] if key in per_token else value for key, value in batch.inputs.items()}
    batch.completion_length = length
    return batch


def delta_rule_in_double(monkeypatch: Any) -> None:
    """Let the linear attention of Qwen3.5 keep float64; it computes in float32, in blocks, whatever it is given."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        rule = inspect.unwrap(getattr(modeling_qwen3_5, name))
        source = inspect.getsource(rule).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        names = dict(vars(modeling_qwen3_5))
        exec(source[source.index("def ") :], names)
        monkeypatch.setattr(modeling_qwen3_5, name, names[name])
