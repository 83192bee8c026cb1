from functools import partial

import pandas
import pytest
import torch
from datasets import concatenate_datasets
from support.trainers import letters_reward, logged

from vgr_trl.advantages import estimate_advantages
from vgr_trl.batch import Batch
from vgr_trl.rewards import accuracy_reward, vgr_reward
from vgr_trl.rollout import Rollout
from vgr_trl.sampling.zero_variance import GroupSelector, prompt_key


def coarse_reward(completions, **kwargs):
    """1 for about every tenth completion, so that many groups have equal rewards."""
    return [float(sum(map(ord, completion[0]["content"])) % 11 == 0) for completion in completions]


def constant_reward(completions, **kwargs):
    return [1.0 for _ in completions]


@pytest.fixture
def make(vision_trainer):
    return partial(vision_trainer, rewards=coarse_reward, max_steps=4)


def trained_batches(trainer):
    kept = []
    original = trainer._compute_loss

    def compute_loss(model, inputs):
        loss = original(model, inputs)
        kept.append(dict(inputs))
        return loss

    trainer._compute_loss = compute_loss
    return kept


@pytest.fixture
def on_choice(monkeypatch):
    def watch(see):
        """Keep what `see` makes of the advantages before groups are selected, and of the rollout after it."""
        kept, select = [], GroupSelector.select

        def selecting(selector, rollout, weights):
            before = rollout.batch.advantages
            metrics = select(selector, rollout, weights)
            kept.append(see(before, rollout))
            return metrics

        monkeypatch.setattr(GroupSelector, "select", selecting)
        return kept

    return watch


def test_zero_variance_groups_are_replaced_by_stored_ones_with_the_ratio_of_their_own_policy(make):
    trainer = make(replay_buffer_size=8, max_steps=6, learning_rate=5e-3)
    batches = trained_batches(trainer)
    trainer.train()
    replaced = logged(trainer, "replay/replaced_fraction")
    dead = logged(trainer, "frac_reward_zero_std")
    assert sum(replaced) > 0
    assert all(now <= fraction for now, fraction in zip(replaced, dead, strict=True))
    for batch, fraction in zip(batches, replaced, strict=True):
        if fraction:
            old = batch["old_per_token_logps"]
            assert not old.isnan().any(), "fresh rows have those of the scoring pass"
            assert batch["advantages"].abs().amax() > 0
    assert batches[0].get("old_per_token_logps") is None, "nothing was replayed in the first step"
    ratios = logged(trainer, "approx_kl")
    assert max(ratio for ratio, fraction in zip(ratios, replaced, strict=True) if fraction) > 1e-7
    fresh = [ratio for ratio, fraction in zip(ratios, replaced, strict=True) if not fraction]
    assert all(ratio is None or ratio < 1e-9 for ratio in fresh), "where no group is live there is none"


def test_groups_age_while_none_are_added(make):

    def at_first_reward(completions, trainer_state, **kwargs):
        return [0.0 if trainer_state.global_step == 0 and index % 2 else 1.0 for index in range(len(completions))]

    trainer = make(rewards=at_first_reward, replay_buffer_size=8, replay_max_age=2, max_steps=4)
    trainer.train()
    assert logged(trainer, "replay/size") == [2, 2, 2, 0]
    assert logged(trainer, "replay/mean_age") == [0, 1, 2, 0]
    assert logged(trainer, "replay/replaced_fraction") == [0, 1, 1, 0]


def test_the_fraction_that_is_logged_is_that_of_the_selection(make):
    """The KL in the rewards differs within a group of equal task rewards, once the policy has moved."""

    def at_first_reward(completions, trainer_state, **kwargs):
        return [float(trainer_state.global_step > 0 or index % 2) for index in range(len(completions))]

    trainer = make(rewards=at_first_reward, kl_coef=0.1, use_kl_loss=False, max_steps=3, learning_rate=1e-2)
    trainer.train()
    assert logged(trainer, "sampling/nonzero_variance_fraction") == [1.0, 0.0, 0.0]
    assert logged(trainer, "frac_reward_zero_std") == [0.0] * 3


def test_a_reward_of_the_user_that_is_constant_is_named_once(make, monkeypatch):
    warnings = []
    monkeypatch.setattr("vgr_trl.rewards.calling.logger.warning", warnings.append)
    make(rewards=[constant_reward, letters_reward, "length"], max_steps=3).train()
    (warning,) = (warning for warning in warnings if "_reward" in warning or "punishment" in warning)
    assert "constant_reward" in warning


def test_further_prompts_replace_zero_variance_groups(make, tmp_path):
    trainer = make(dynamic_sampling="resample", dynamic_sampling_max_rounds=4, log_completions=True,
                   num_completions_to_print=0)  # fmt: skip
    trainer.train()
    live = logged(trainer, "sampling/nonzero_variance_fraction")
    dead = logged(trainer, "frac_reward_zero_std")
    generated = logged(trainer, "dynamic_sampling/generated_groups")
    discarded = logged(trainer, "dynamic_sampling/discarded_groups")
    assert sum(generated) > 0
    assert all(1 - fraction <= now for fraction, now in zip(dead, live, strict=True))
    assert all(0 <= lost <= made for lost, made in zip(discarded, generated, strict=True))
    tables = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
    assert len(set(generated)) > 1
    assert [len(pandas.read_parquet(table)) for table in tables] == [8 + 4 * groups for groups in generated]


def test_no_prompt_is_twice_in_a_batch(make, vision_trainer):
    """Five prompts, each twice in the data, two in a rollout; no group has a gradient, so further ones are drawn."""
    rows = vision_trainer.rows.select(range(5))
    trainer = make(
        rewards=constant_reward, rows=concatenate_datasets([rows, rows]), max_steps=5, dynamic_sampling="resample",
        dynamic_sampling_max_rounds=4,
    )  # fmt: skip
    rollouts, fill, score = [], trainer.generate_and_score, trainer._generate_and_score_completions

    def filling(rollout):
        (own, further) = rollouts[-1]
        (further if own else own).extend(prompt_key(row) for row in rollout.rows[::4])
        return fill(rollout)

    trainer.generate_and_score = filling
    trainer._generate_and_score_completions = lambda rows: rollouts.append(([], [])) or score(rows)
    trainer.train()
    for epoch, further in rollouts:
        assert len(further) == len(set(further)) == 5 - len(set(epoch)), "all that the data have, once"
        assert not set(epoch).intersection(further)


def test_quantiles_are_those_of_the_first_round(make):
    """Means 0.1 and 0.7: the quantiles 0.4 and 0.99 are 0.34 and 0.694; 0.4 lies between them."""
    trainer = make(online_filtering=True, filter_key="overall", filter_mode="quantile", filter_low=0.4)

    def found(values, bounds=None):
        zeros = torch.zeros(8)
        rollout = Rollout([])
        rollout.batch = Batch(*[zeros[:, None]] * 4, advantages=zeros)
        rollout.rewards = torch.tensor(values)[:, None]
        return trainer.selector.find_zero_variance(rollout, trainer.reward_weights, bounds)

    first = found([0.0, 0.0, 0.0, 0.4, 0.0, 0.8, 1.0, 1.0])
    assert first.filtered == [0, 1]
    assert found([0.2, 0.2, 0.2, 0.21, 0.4, 0.4, 0.4, 0.41], first.bounds).filtered == [0]


@pytest.mark.parametrize(
    ("options", "epsilon"),
    [
        ({"scale_rewards": "batch", "replay_buffer_size": 8, "dynamic_sampling_max_rounds": 1, "max_steps": 8}, 1e-4),
        ({"advantage_estimator": "reinforce_plus_plus", "dynamic_sampling_max_rounds": 4, "max_steps": 6}, 1e-8),
    ],
)
def test_one_deviation_divides_what_is_trained_on_whichever_round_it_came_from(make, on_choice, options, epsilon):
    """Rewards are 0 or 1, so the largest advantage of each group is 1 / (deviation + epsilon) above its smallest."""
    trainer = make(dynamic_sampling="resample", seed=4, **options)

    def see(before, chosen):
        rewards = torch.tensor(list(trainer._logs["rewards"]["coarse_reward"])).view(-1, 4)
        return chosen.batch.advantages.view(2, 4), len(chosen.replaced), rewards, list(trainer._logs["advantages"])

    seen = on_choice(see)
    trainer.train()
    mixed = 0
    for advantages, replaced, rewards, table in seen:
        spread = advantages.amax(1) - advantages.amin(1)
        if not spread.all():
            continue
        mixed += replaced == 1
        divided = (advantages > 0).float() if "scale_rewards" in options else advantages / spread.unsqueeze(1)
        if replaced or "scale_rewards" not in options:
            assert spread.tolist() == pytest.approx([1 / (divided.std().item() + epsilon)] * 2, rel=1e-5)
        if "scale_rewards" not in options:
            expected = (rewards - rewards.mean(1, keepdim=True)).flatten() / (divided.std() + epsilon)
            assert table == pytest.approx(expected.tolist(), abs=1e-5), "the table has all that was generated"
    assert mixed > 0


def test_the_kl_in_the_rewards_hides_no_zero_variance_group(make, on_choice):
    trainer = make(kl_coef=1e-4, use_kl_loss=False, dynamic_sampling="resample", learning_rate=5e-3, max_steps=5)
    seen = on_choice(lambda before, chosen: (before, chosen.rewards, chosen.selection.dropped))
    trainer.train()
    hidden = 0
    for advantages, rewards, dropped in seen:
        equal = rewards[:, 0].view(2, 4).std(1) == 0
        assert dropped == equal.nonzero().flatten().tolist()
        hidden += bool((advantages.view(2, 4)[equal].abs() > 0.1).any())
    assert hidden > 0, "where the KL of completions differs"


@pytest.mark.parametrize("estimator", ["rloo", "remax"])
def test_the_advantages_in_the_table_are_those_of_the_rewards_in_it(make, estimator):
    trainer = make(advantage_estimator=estimator, max_steps=3)
    batches = trained_batches(trainer)
    trainer.train()
    rewards = torch.tensor(list(trainer._logs["rewards"]["coarse_reward"])).view(2, 4)
    advantages = torch.tensor(list(trainer._logs["advantages"])).view(2, 4)
    baseline = (rewards - advantages)[:, 0] if estimator == "remax" else None
    assert baseline is None or set(baseline.tolist()) <= {0.0, 1.0}, "the reward of one completion"
    expected = estimate_advantages(rewards.flatten(), 4, estimator, baseline).view(2, 4)
    assert torch.allclose(advantages, expected, atol=1e-5)
    assert torch.allclose(batches[-1]["advantages"].sort().values, advantages.flatten().sort().values, atol=1e-5)


def test_greedy_completions_leave_no_trace(make):
    trainers = []
    for name in ("grpo", "remax"):
        trainers.append(make(rewards=[accuracy_reward, vgr_reward], advantage_estimator=name, max_steps=1))
        trainers[-1].train()
    plain, remax = trainers
    for name in ("completions/mean_length", "num_tokens", "attention/late/vgr", "rewards/vgr_reward/mean"):
        assert logged(plain, name) == logged(remax, name), name
    assert len(remax._logs["completion"]) == 8


@pytest.mark.parametrize("others", [[], [vgr_reward]], ids=["alone", "beside a rank"])
def test_greedy_completions_without_a_reward_are_no_baseline(make, others):
    """ReMax; rewards of sampled completions lie far from 0."""

    def reward(completions, **kwargs):
        return [None if trainer._rollout.greedy else 25.0] * len(completions)

    trainer = make(rewards=[reward, *others], advantage_estimator="remax", max_steps=1)
    trainer.train()
    assert set(trainer._logs["advantages"]) == {0.0}


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"num_generations": 2}, "num_generations is 2, and its groups have 4 completions."),
        ({"token_weights": True, "kl_penalty": "full"}, "stored without kl_penalty full and attention and token_w"),
        ({"advantage_estimator": "rloo"}, "advantage_estimator is rloo, and was grpo."),
    ],
    ids=str,
)
def test_a_buffer_that_new_options_cannot_use_starts_empty(make, tmp_path, monkeypatch, after, message):
    common = {"replay_buffer_size": 8, "compute_attention_metrics": False, "kl_coef": 0.01}
    make(save_strategy="steps", save_steps=4, max_steps=4, **common).train()
    warnings = []
    monkeypatch.setattr("vgr_trl.sampling.replay.logger.warning", warnings.append)
    resumed = make(max_steps=5, **common | after)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    (warning,) = warnings
    assert message in warning
    assert logged(resumed, "replay/size")[0] <= 2, "what one batch brought"
