"""Options inside verl: names of the notes and ours, and what is refused."""

import pytest

from vgr_trl.integrations.verl.options import SignalOptions, options_of
from vgr_trl.utils import ConfigError


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
