import warnings

import pytest
import torch

from vgr_trl.credit import stack_weights, warn_of_padding
from vgr_trl.errors import ConfigError, DataError, RewardError
from vgr_trl.integrations.verl import credit as verl
from vgr_trl.integrations.verl.inside_easyr1.main import split_arguments
from vgr_trl.options import changed_options

TWICE = {"token_weights": True, "enable_token_weights": True}
RIGHT = "<think>the sky</think><answer>B</answer>"


def test_names_of_the_notes():
    given = {"enable_token_weights": True, "token_weight_clip": (0.5, 2.0), "positive_only": True}
    options = verl.SignalOptions.read(given)
    expected = {"token_weights": True, "token_weights_clip": [0.5, 2.0], "token_weights_positive_only": True}
    assert changed_options(options) == expected
    assert verl.SignalOptions.read(given | {"token_weight_clip": "(0.5,2.0)"}) == options
    assert options.measures_attention
    assert verl.SignalOptions.read(changed_options(options)) == options
    assert not verl.SignalOptions.read(given | {"collect_attentions": True}).measures_attention


@pytest.mark.parametrize("given", [{"blur": 3}, TWICE, {"apply_to": "mask"}, {"seed": 1}, {"credit_rules": ["vgpo"]}])
def test_options_that_are_refused(given):
    with pytest.raises(ConfigError):
        verl.SignalOptions.read(given)


def test_names_of_estimators_and_losses_switch_options_on():
    assert verl.resolve_options("vgr_vppo", {}).enable_trajectory_reweighting
    assert not verl.resolve_options("vgr_vppo", {"enable_trajectory_reweighting": False}).enable_trajectory_reweighting
    assert verl.resolve_options("grpo", {"use_entropy_penalty": True}, "vgr_vppo").use_entropy_penalty
    for given in (("grpo", {"token_weights": True}), ("vgr", {"use_entropy_penalty": True}, "vanilla"),
                  ("vgr", {}, "vgr_papo")):  # fmt: skip
        with pytest.raises(ConfigError):
            verl.resolve_options(*given)


def test_score_of_verl():
    info = {"choices": ["red", "blue"], "response_length": 15}
    limits = {"max_completion_len": 20, "soft_punish_cache": 10}
    score = verl.compute_score("set", RIGHT, "blue", info, format_weight=0.5, length_weight=0.2, **limits)
    assert score == {"accuracy": 1, "format": 1, "length": -0.5, "score": pytest.approx(1 + 0.5 - 0.1)}
    managed = verl.compute_score("set", "<answer>A</answer>", "B", reward_router_address="10.0.0.1")
    assert managed == {"score": 0, "accuracy": 0, "format": 0}
    with pytest.raises(RewardError):
        verl.compute_score("set", RIGHT, "B", {}, length_weight=1.0, **limits)


def test_scores_of_easyr1():
    rows = [{"response": text, "response_length": 18, "ground_truth": "B"} for text in (RIGHT, "B?")]
    limits = {"length_weight": 1.0, "max_completion_len": 20, "soft_punish_cache": 4}
    first, second = verl.compute_scores(rows, format_weight=1.0, **limits)
    assert first == {"overall": 1.5, "accuracy": 1, "format": 1, "length": -0.5}
    assert second["overall"] == -0.5
    assert verl.REWARD_TYPE == "batch"


def estimate(base, context, rewards, mask, index):
    with verl.set_signal_context(context):
        estimator = verl.make_estimator("vgr", lambda name: base)
        return estimator(rewards, mask, index, config=None)[0]


def centred(token_level_rewards, response_mask, index, **_):
    each = (token_level_rewards.sum(1, keepdim=True) - 0.5) * response_mask
    return each, each


def test_rewards_made_of_attention():
    """VGR 1, 2, 3, 4 of one prompt, in any order: 1, 5/6, 1/6, 0; the right ones, 1, 2, 4: 0.5, 1/6, -0.5, wrong: 0.

    Their balance with a ratio of 2 is 1, 0, 0, 0: rewards 1, -1, -1, -1. Rows without tokens fill the batch of verl.
    """
    vgr, mask = torch.tensor([2.0, 1.0, 4.0, 3.0, 0.0]), torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 0]])
    weights = {"vgr_reward_weight": 1.0, "hard_negative_reward_weight": 10.0, "mdi_reward_weight": 100.0}
    columns = {"vgr_vision": torch.ones(5, 2), "vgr_instruction": vgr.unsqueeze(1).expand(5, 2) * mask}
    context, rewards = verl.SignalContext(verl.SignalOptions.read(weights), columns), torch.zeros(5, 2)
    rewards[[0, 1, 2], [1, 0, 1]] = 1.0
    index = ["x", "x", "x", "x", "fill"]
    advantages = estimate(centred, context, rewards, mask, index)
    expected = [1 + 5 / 6 + 10 / 6 - 100, 1 + 1 + 5 + 100, 1 + 0 - 5 - 100, 1 / 6 - 100]
    assert advantages[:4, 0].tolist() == pytest.approx([value - 0.5 for value in expected])
    assert advantages[1].tolist() == [pytest.approx(106.5), 0]
    assert advantages[4].tolist() == [0, 0]
    assert context.metrics["rewards/vgr/mean"] == pytest.approx(0.5)
    assert context.metrics["rewards/mdi/not_applicable"] == 0


@pytest.mark.parametrize("where", ["rollout", "actor"])
def test_weights_and_another_rule_multiply(where):
    """VGR 1, 2, 4: weights 12/7, 6/7, 3/7 (definitions); the filter keeps the two tokens of largest dependency."""
    options = verl.resolve_options("vgr", {"credit_rules": ["token_weights", "perception_filter"],
                                      "top_p_perception_tokens": 0.6, "positive_only": True})  # fmt: skip
    columns = {"vgr_dependency": torch.tensor([[3.0, 1.0, 2.0]]).repeat(2, 1)}
    weights = torch.tensor([[4.0, 2.0, 1.0]]).repeat(2, 1)
    if where == "actor":
        columns["vgr_token"] = torch.tensor([[1.0, 2.0, 4.0]]).repeat(2, 1)
    context = verl.SignalContext(options, columns, weights if where == "rollout" else None)
    mask, rewards = torch.ones(2, 3), torch.tensor([[0.0, 0.0, 1.5], [0.0, 0.0, -0.5]])
    advantages = estimate(centred, context, rewards, mask, ["a", "a"])
    expected = [[12 / 7, 0, 3 / 7], [-1, 0, -1]]
    assert advantages.tolist() == [pytest.approx(row, abs=1e-5) for row in expected]
    assert context.metrics["vgr/token_weight_mean"] == pytest.approx(1)


def test_without_weights_all_are_1_and_a_reward_needs_attention():
    mask = torch.ones(1, 2)
    context = verl.SignalContext(verl.resolve_options("vgr_token_weights", {"collect_attentions": True}))
    with pytest.warns(UserWarning, match="all weights are 1"):
        assert estimate(centred, context, mask, mask, ["a"]).tolist() == [[1.5, 1.5]]
    with pytest.raises(ConfigError):
        estimate(centred, verl.SignalContext(verl.SignalOptions.read({"vgr_reward_weight": 1.0})), mask, mask, ["a"])
    with pytest.raises(ConfigError):
        verl.make_estimator("vgr", lambda name: centred)(mask, mask, ["a"])


def test_lists_and_tensors_are_padded_or_cut_with_a_warning():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stack_weights([[1.0, 2.0, 3.0], [4.0, 5.0]], mask).tolist() == [[1, 2, 3], [4, 5, 1]]
        assert stack_weights(torch.full((2, 3), 2.0), mask).tolist() == [[2, 2, 2], [2, 2, 2]]
    warn_of_padding.cache_clear()
    uneven = [1.0, 2.0], torch.arange(5.0)
    with pytest.warns(UserWarning, match="padded with 1 or cut"):
        assert stack_weights(uneven, mask).tolist() == [[1, 2, 1], [0, 1, 2]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack_weights(uneven, mask)  # said once
    with pytest.raises(DataError):
        stack_weights([["much"], None], mask)


def test_the_command_line_of_easyr1_is_split():
    theirs, own = split_arguments(
        ["config=examples/config.yaml", "vgr.preset=vgr_vppo", "vgr.token_weight_clip=[0.5, 2.0]", "trainer.nnodes=2"]
    )
    assert theirs == ["config=examples/config.yaml", "trainer.nnodes=2"]
    assert own == {"preset": "vgr_vppo", "token_weight_clip": [0.5, 2.0]}
