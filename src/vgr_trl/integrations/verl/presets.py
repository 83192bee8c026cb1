"""The names under which estimators and losses are registered, and the options that each switches on."""

from collections.abc import Mapping
from typing import Any

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.options import NAMES_OF_NOTES, SignalOptions

ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "vgr": {},
    "vgr_vppo": {"enable_perception_filtering": True, "enable_trajectory_reweighting": True},
    "vgr_token_weights": {"token_weights": True},
}
LOSSES = ("vgr", "vgr_vppo", "vgr_papo")  # verl's vanilla loss, and the terms that the options switch on


def options_of(adv_estimator: str, given: Mapping[str, Any] | None, loss_mode: str | None = None) -> SignalOptions:
    """Return the options of a run: those given, on top of what the names of estimator and loss switch on.

    Args:
        adv_estimator: of the configuration.
        given: options, named as in `SignalOptions` or in the notes.
        loss_mode: of the configuration; None where the trainer has no registry of losses.

    Raises:
        ConfigError: an option is unknown, out of range, or would have no effect.
    """
    stated = {NAMES_OF_NOTES.get(key, key) for key in given or ()}
    named = {name: value for name, value in ESTIMATORS.get(adv_estimator, {}).items() if name not in stated}
    options = SignalOptions.read(named | dict(given or {}))
    shapes = options.shapes_advantages or options.rewards_attention
    if shapes and adv_estimator not in ESTIMATORS:
        raise ConfigError(
            f"Options of this library shape advantages, but adv_estimator is {adv_estimator!r}, which does not read "
            f"them: give one of {', '.join(ESTIMATORS)}, and {adv_estimator!r} as the option estimator."
        )
    terms = options.use_entropy_penalty or options.uses_perception_loss or options.der_loss_weight1 > 0
    if loss_mode is not None and terms and loss_mode not in LOSSES:
        raise ConfigError(
            f"Options of this library add terms to the loss, but loss_mode is {loss_mode!r}, which does not read them: "
            f"give one of {', '.join(LOSSES)}."
        )
    if loss_mode == "vgr_papo" and not options.uses_perception_loss:
        raise ConfigError("loss_mode is vgr_papo, but perception_loss_weight is 0: give it a weight, such as 0.01.")
    return options
