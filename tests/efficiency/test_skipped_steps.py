import math
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, PrefixTuningConfig
from support.launching import ENGINES, KINDS, launch
from support.old_releases import KEEPS_LESS, keeps_prefix
from support.steps import LOSSES, ROUNDING, relative_difference, uneven_reward
from support.trainers import logged, whole_parameters
from text_runs import START, build, computed_tokens, equal_rewards, train

TWICE = {"num_iterations": 2}  # the second time the policy is not the one that wrote the completions
WHOLE_COMPLETIONS = ("luspo", "vespo")
TASK = {"task_type": "CAUSAL_LM"}
READ_WHOLE_ROWS = {
    "prefix tuning": PrefixTuningConfig(**TASK, num_virtual_tokens=3),
    "aLoRA": LoraConfig(**TASK, r=2, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[4]),
}
OF_EMBEDDINGS = {"trainable tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[4, 5, 7])}
# Groups straddle micro-batches; credit per token, which vespo reads with the ratio of the whole completion.
SMALL = {"gradient_checkpointing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SMALL["peft"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
OF_ADAPTERS = {name: {"beta": 0.1, "peft": peft} for name, peft in (READ_WHOLE_ROWS | OF_EMBEDDINGS).items()}
OF_ADAPTERS |= {"checkpointed": SMALL, "checkpointed vespo": SMALL | LOSSES["vespo"]}
drops_caches = pytest.mark.skipif(KEEPS_LESS, reason="checkpoints drop caches")
OF_RELEASES = {"prefix tuning": keeps_prefix, "checkpointed": drops_caches, "checkpointed vespo": drops_caches}
TABLE = yaml.safe_load(Path(__file__).with_name("steps.yaml").read_text(encoding="utf-8"))
CASES, BUDGETS = TABLE["other options"], TABLE["budgets"]
READ = {"beta": 0.1, "entropy_coef": 0.1, "top_entropy_quantile": 0.5}
COMPARED = {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 1e-4}
WORKER = Path(__file__).with_name("skip_worker.py")


def assert_equal_steps(start=START, ours_only=(), **settings):
    stock, ours = train(True, **settings), train(False, **settings | dict(ours_only))
    assert relative_difference(start, whole_parameters(ours), whole_parameters(stock)) < ROUNDING
    return ours


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_of_every_loss(loss):
    """One group has no variance, the other has an advantage for every other completion; credit where it is read."""
    ours = assert_equal_steps(**LOSSES[loss], **TWICE, credit=loss not in WHOLE_COMPLETIONS)
    assert ours.run.features.skip_zero_advantage_tokens.enabled == (loss not in WHOLE_COMPLETIONS)
    assert ours.run.features.regroup.enabled == (loss != "bnpo")
    assert min(logged(ours, "skipped/rows")) >= 5  # of 6 without an advantage; a micro-batch of such rows runs one


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_RELEASES.get(name, ())) for name in OF_ADAPTERS])
def test_steps_of_adapters(name):
    settings = OF_ADAPTERS[name] | {**TWICE, "credit": True}
    ours = assert_equal_steps(whole_parameters(build(True, **settings)), **settings)
    assert (min(logged(ours, "skipped/rows")) > 0) == ("beta" not in settings)
    for feature in ("share_generation", "share_scoring", "share_training", "skip_padding"):
        assert getattr(ours.run.features, feature).enabled == (name not in READ_WHOLE_ROWS)


@pytest.mark.parametrize("case", CASES)
def test_steps_with_other_options(case):
    ours = assert_equal_steps(**CASES[case])
    assert min(logged(ours, "skipped/tokens")) > 0


@pytest.mark.parametrize("option", READ)
def test_nothing_is_left_out_that_another_term_reads(option):
    ours = assert_equal_steps(**{option: READ[option]})
    assert str(ours.run.features.skip_zero_advantage) == f"off ({option} reads all tokens)"
    assert sum(logged(ours, "skipped/rows") + logged(ours, "skipped/tokens")) == 0


@pytest.mark.parametrize("option", COMPARED)
def test_whole_completions_run_where_they_are_compared(option):
    ours = assert_equal_steps(**{option: COMPARED[option]}, **TWICE)
    assert f"skip_zero_advantage: on; skip_zero_advantage_tokens: off ({option}" in str(ours.run.features)
    assert min(logged(ours, "skipped/rows")) >= 5


def test_steps_with_neftune_are_trls_to_the_same_random_numbers():
    """Its noise is drawn for the rows and columns of a pass: nothing is shared, left out or rearranged."""
    ours = assert_equal_steps(neftune_noise_alpha=5.0, **TWICE)
    assert sum(logged(ours, "skipped/rows")) == 0


@pytest.mark.parametrize("settings", [{}, TWICE])
def test_steps_without_any_gradient(settings):
    settings = {"optim": "adamw_torch_fused", "weight_decay": 0.1, "logging_nan_inf_filter": False} | settings
    ours = assert_equal_steps(reward=equal_rewards, **settings)
    assert logged(ours, "skipped/rows") == [7, 7, 7]  # the first of two micro-batches of four runs one row
    assert logged(ours, "entropy") == [None] * 3  # of no token there is one
    assert all(math.isfinite(norm) and norm == 0 for norm in logged(ours, "grad_norm"))
    assert logged(ours, "loss") == [0] * 3


@pytest.mark.parametrize("loss", BUDGETS)
def test_micro_batches_in_parts(loss):
    """28 tokens hold one row of the longest prompt, 22, and the longest completion, 6, and several of shorter ones."""
    settings, shares = BUDGETS[loss] | {"reward": uneven_reward}, "off" if loss == "dr_grpo" else "auto"
    stock = train(True, **settings)
    with computed_tokens(True) as training, computed_tokens(False) as scoring:
        ours = train(False, **settings, max_tokens_per_micro_batch=28, share_prompts=shares)
    assert relative_difference(START, whole_parameters(ours), whole_parameters(stock)) < ROUNDING
    assert len(training) > 3 * ours.args.gradient_accumulation_steps
    assert max(training) <= 28
    assert not scoring or max(scoring) <= 28


def test_old_log_probabilities_of_the_first_pass():
    with computed_tokens(False) as scoring:
        ours = train(False, **TWICE)
    assert ours.run.features.reuse_first_pass.enabled
    assert scoring == []
    kl = logged(ours, "approx_kl")
    assert kl[0] == kl[2] == 0
    assert kl[1] > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_trl(kind):
    launch(WORKER, kind, processes=2, engine=ENGINES[kind])
