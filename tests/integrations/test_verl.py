"""What verl and EasyR1 get of this library, without either: options, rewards, advantages, the command line."""

import pytest
import torch

from vgr_trl import registries
from vgr_trl.integrations.verl.credit import SignalContext, estimate
from vgr_trl.integrations.verl.inside_easyr1 import rewards as easyr1_rewards
from vgr_trl.integrations.verl.inside_easyr1.main import split_arguments
from vgr_trl.integrations.verl.options import SignalOptions, options_of
from vgr_trl.integrations.verl.rewards import SCORES, compute_score
from vgr_trl.utils import ConfigError, RewardError


def test_names_of_the_notes():
    given = {
        "enable_token_weights": True, "token_weight_clip": (0.5, 2.0), "token_weight_smooth_sigma": 1.5,
        "token_weight_last_k_layers": 4, "token_weight_topk_ratio": 0.3, "positive_only": True,
    }  # fmt: skip
    options = SignalOptions.read(given)
    assert options.token_weights
    assert options.token_weights_clip == [0.5, 2.0]
    assert (options.token_weights_smooth_sigma, options.token_weights_last_k_layers) == (1.5, 4)
    assert (options.token_weights_topk_ratio, options.token_weights_positive_only) == (0.3, True)
    assert options.measures_attention
    assert SignalOptions.read(options.to_dict()) == options
    assert not SignalOptions.read(given | {"collect_attentions": True}).measures_attention


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"blur_radius": 3}, "blur_radius is not known here"),
        ({"token_weights": True, "enable_token_weights": True}, "token_weights is given twice"),
        ({"token_weight_topk_ratio": 2.0}, "topk_ratio is 2.0"),
        ({"collect_attentions": True}, "collect_attentions is given, but enable_token_weights is off"),
        ({"apply_to": "mask"}, "apply_to is given, but enable_token_weights is off"),
        ({"token_weight_last_k_layers": 2}, "token_weights_last_k_layers is given, but token_weights is False"),
        ({"top_p_perception_tokens": 0.4}, "but enable_perception_filtering is False"),
        ({"black_prob": 0.3}, "but nothing is measured on perturbed images"),
        ({"seed": 1}, "but nothing is measured on perturbed images"),
        ({"right_from": 0.1, "vgr_reward_weight": 1.0}, "right_from is given, but hard_negative_reward_weight is 0"),
        ({"mdi_balance_ratio": 3.0, "vgr_reward_weight": 1.0}, "but mdi_reward_weight is 0"),
        ({"share_prompts": "off"}, "share_prompts is given, but the actor measures no attention"),
        ({"hidden_similarity_layer": 2}, "hidden_similarity_layer is not known here"),
        ({"credit_rules": ["vgpo"]}, "the credit rule vgpo reads similarity, which is not measured here"),
        ({"apply_to": "loss", "token_weights": True}, "apply_to is 'loss'"),
    ],
)
def test_what_is_refused(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SignalOptions.read(given)


def test_options_without_effect_are_refused():
    assert options_of("vgr_vppo", {}).enable_trajectory_reweighting
    assert not options_of("vgr_vppo", {"enable_trajectory_reweighting": False}).enable_trajectory_reweighting
    assert options_of("grpo", {"use_entropy_penalty": True}, "vgr_vppo").use_entropy_penalty
    for estimator, given, loss, sentence in (
        ("grpo", {"token_weights": True}, None, "adv_estimator is 'grpo', which does not read"),
        ("vgr", {"use_entropy_penalty": True}, "vanilla", "loss_mode is 'vanilla', which does not read"),
        ("vgr", {}, "vgr_papo", "perception_loss_weight is 0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            options_of(estimator, given, loss)


RIGHT = "<think>the sky</think><answer>B</answer>"


def test_score_of_verl():
    info = {"choices": ["red", "blue"], "response_length": 15}
    limits = {"max_completion_len": 20, "soft_punish_cache": 10}
    score = compute_score("set", RIGHT, "blue", info, format_weight=0.5, length_weight=0.2, **limits)
    assert score == {"accuracy": 1, "format": 1, "length": -0.5, "score": pytest.approx(1 + 0.5 - 0.1)}
    assert compute_score("set", "<answer>A</answer>", "B") == {"score": 0, "accuracy": 0, "format": 0}


def test_a_weight_that_is_misspelt():
    with pytest.raises(TypeError, match="formt_weight"):
        compute_score("set", RIGHT, "B", formt_weight=0.5)
    managed = compute_score("set", RIGHT, "B", reward_router_address="10.0.0.1", reward_model_tokenizer=None)
    assert managed["score"] == 1


def test_scores_of_easyr1():
    rows = [{"response": text, "response_length": 18, "ground_truth": "B"} for text in (RIGHT, "B?")]
    limits = {"length_weight": 1.0, "max_completion_len": 20, "soft_punish_cache": 4}
    first, second = easyr1_rewards.compute_score(rows, format_weight=1.0, **limits)
    assert first == {"overall": 1.5, "accuracy": 1, "format": 1, "length": -0.5}
    assert second["overall"] == -0.5
    assert easyr1_rewards.REWARD_TYPE == "batch"


def test_rewards_made_of_attention_read_what_was_measured():
    """VGR 1, 2, 3, 4: rewards 1, 0.8333, 0.1667, 0; among the right ones 1, 2, 4: 0.5, 0.1667, 0, -0.5."""
    info = {"group_vgr": [1.0, 2.0, 3.0, 4.0], "group_accuracy": [1.0, 1.0, 0.0, 1.0], "vgr": 2.0**0.5}
    found = [[SCORES[name]("set", "", "", info | {"group_index": row}) for row in range(4)] for name in
             ("vgr", "vgr_hard_negative")]  # fmt: skip
    assert found[0] == pytest.approx([1, 5 / 6, 1 / 6, 0])
    assert found[1] == pytest.approx([0.5, 1 / 6, 0, -0.5])
    assert SCORES["mdi"]("set", "", "", info) == pytest.approx(0)


@pytest.mark.parametrize(("name", "key"), [("vgr", "group_vgr"), ("mdi", "vgr"), ("length", "response_length")])
def test_what_is_missing_is_named(name, key):
    with pytest.raises(RewardError, match=f"needs '{key}' in extra_info, which has"):
        SCORES[name]("set", "text", "B", {"index": 3})


def centred(token_level_rewards, response_mask, index, **_):
    each = (token_level_rewards.sum(1, keepdim=True) - 0.5) * response_mask
    return each, each


def estimated(mask, index, found, rewards=None):
    rewards = torch.zeros(mask.shape) if rewards is None else rewards
    return estimate(centred, found, token_level_rewards=rewards, response_mask=mask, index=index)[0]


def test_a_rule_that_compares_completions_knows_their_prompts(monkeypatch):
    seen = {}

    def rule(advantages, signals, mask, options, groups):
        seen["groups"] = groups.tolist()
        return torch.full(mask.shape, 2.0), {}

    monkeypatch.setitem(registries.credit_rules._own, "comparing", rule)
    found = SignalContext(SignalOptions.read({"credit_rules": ["comparing"]}))
    assert (estimated(torch.ones(4, 2), ["b", "a", "b", "c"], found) == -1).all()
    assert seen["groups"] == [0, 1, 0, 2]


def test_rows_that_fill_a_batch_take_no_part():
    """verl appends rows without tokens; those of VGR 1 and 2 are compared with each other alone: 1 and 0."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])
    vgr = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    options = SignalOptions.read({"vgr_reward_weight": 1.0, "mdi_reward_weight": 1.0})
    found = SignalContext(options, {"vgr_vision": torch.ones(4, 2), "vgr_instruction": vgr})
    advantages = estimated(mask, ["x", "x", "fill", "fill"], found)
    balance = {1.0: 1.0, 2.0: -1.0}  # of VGR 1, and of 2 with a ratio of 2
    expected = [[1 + balance[1.0] - 0.5] * 2, [0 + balance[2.0] - 0.5, 0], [0, 0], [0, 0]]
    assert advantages.tolist() == [pytest.approx(row) for row in expected]
    assert found.metrics["rewards/vgr/mean"] == pytest.approx(0.5)
    assert found.metrics["rewards/vgr/not_applicable"] == 0


def test_options_are_taken_out():
    theirs, own = split_arguments(
        ["config=examples/config.yaml", "vgr.preset=vgr_vppo", "vgr.token_weight_clip=[0.5, 2.0]", "trainer.nnodes=2"]
    )
    assert theirs == ["config=examples/config.yaml", "trainer.nnodes=2"]
    assert own == {"preset": "vgr_vppo", "token_weight_clip": [0.5, 2.0]}
