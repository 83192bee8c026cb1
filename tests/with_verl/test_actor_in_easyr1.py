"""EasyR1's actor, estimators and losses with signals, on a CPU.

With `padding_free`, EasyR1 uses functions of flash-attn that only move tokens; they are replaced by ones of plain
torch, and the attention is sdpa, for which transformers tells packed sequences apart.
"""

import numpy as np
import pytest
import torch
from actor_on_cpu import actor, data_of, replace_flash_attn
from reference import CASES, WANTED, Reference, check_golden, golden, needs_golden
from verl.trainer import core_algos
from verl.workers.actor import dp_actor

from vgr_trl.integrations.verl.credit import SignalContext, options_of, set_signal_context, token_terms
from vgr_trl.integrations.verl.inside_easyr1.actor import register


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture(scope="module")
def reference():
    return Reference()


@pytest.mark.parametrize(
    "changed", [{}, {"dynamic_batching": True}, {"padding_free": True}], ids=["padded", "dynamic", "padding free"]
)
def test_signals_beside_log_probabilities(reference, changed, monkeypatch):
    replace_flash_attn(monkeypatch)
    measuring = actor(reference.model, **changed)
    data = data_of(reference.tensors, reference.pixels, reference.processor, WANTED)
    logps = measuring.compute_log_prob(data)
    reference.check_columns(logps, measuring.columns)
    plain = dp_actor.DataParallelPPOActor(measuring.config, reference.model, None)
    assert torch.equal(plain.compute_log_prob(data), logps)


@needs_golden
@pytest.mark.parametrize("case", CASES[:8])
def test_gradients_of_the_published_code(case):
    old, logps, mask, columns, options, given = golden(case)
    core_algos.ADV_ESTIMATOR_MAP["given"] = given
    options = options_of("vgr_vppo", options)
    with set_signal_context(SignalContext(options, columns)):
        shaped, _ = core_algos.compute_advantage_return(
            "vgr_vppo", token_level_rewards=torch.zeros_like(old), response_mask=mask.long(), index=np.arange(len(old)),
            gamma=1.0, lam=1.0,
        )  # fmt: skip
    loss, _ = core_algos.compute_policy_loss(
        old_log_probs=old, log_probs=logps, advantages=shaped, response_mask=mask, clip_ratio_low=0.2,
        clip_ratio_high=0.3, clip_ratio_dual=3.0, tau_positive=1.0, tau_negative=1.0, loss_type="default",
        loss_avg_mode="token",
    )  # fmt: skip
    for term in token_terms(SignalContext(options), logps, mask).values():
        loss = loss + core_algos.average_loss(term, mask, mode="token")
    loss.backward()
    check_golden(logps, case)
