"""From rewards to the loss."""

from vgr_trl.config.foreign.rules.values import Set, Values

_ACTOR, _CRITIC = "worker.actor", "worker.critic"
_AS_THE_POLICY = (
    "global_batch_size", "ppo_epochs", "max_grad_norm", "loss_avg_mode", "optim.weight_decay", "optim.betas",
)  # fmt: skip
_ESTIMATORS = ("grpo", "rloo", "remax", "grpo_passk", "gae")


def advantages(values: Values, set_: Set) -> None:
    """How completions are compared."""
    key = "algorithm.adv_estimator"
    kind = values[key]
    if kind == "reinforce_plus_plus":
        values.refuse(key, "theirs has no baseline, ours of that name has the mean of the group: use rloo or grpo")
    elif kind not in _ESTIMATORS:
        values.refuse(key, f"here it can be {', '.join(_ESTIMATORS)}")
    else:
        set_("advantage_estimator", kind, key)
    reweighted, filtered = "algorithm.enable_trajectory_reweighting", "algorithm.enable_perception_filtering"
    set_("enable_trajectory_reweighting", bool(values[reweighted] and values[filtered]), reweighted, filtered)


def critic(values: Values, set_: Set) -> None:
    """A model of its own with a head, trained beside the policy; only with GAE, as theirs."""
    waits = "trainer.critic_warmup"
    if values["algorithm.adv_estimator"] != "gae":
        if values.whole(waits, 0) > 1:
            values.refuse(waits, "there the policy waits that many steps, though there is no critic")
        return
    for name in ("gamma", "lam"):
        set_(name, float(values[f"algorithm.{name}"]), f"algorithm.{name}")
    set_("critic", "model", f"{_CRITIC}.model.model_path")
    set_("critic_learning_rate", float(values[f"{_CRITIC}.optim.lr"]), f"{_CRITIC}.optim.lr")
    set_("cliprange_value", float(values[f"{_CRITIC}.cliprange_value"]), f"{_CRITIC}.cliprange_value")
    steps = values[f"{_CRITIC}.optim.lr_warmup_steps"]
    steps = 0 if steps in (None, -1) else steps
    set_("critic_warmup_steps", steps * values.updates, f"{_CRITIC}.optim.lr_warmup_steps")
    if steps == 0 and values[f"{_CRITIC}.optim.lr_warmup_ratio"]:
        values.refuse(f"{_CRITIC}.optim.lr_warmup_ratio", "give lr_warmup_steps, which critic_warmup_steps are")
    set_("critic_warmup", max(0, values.whole(waits, 0) - 1) * values.updates, waits)
    if values[f"{_CRITIC}.model.model_path"] not in (None, values["worker.actor.model.model_path"]):
        values.refuse(f"{_CRITIC}.model.model_path", "the critic starts as a copy of the policy")
    for name in _AS_THE_POLICY:
        key, policys = f"{_CRITIC}.{name}", values[f"{_ACTOR}.{name}"]
        if key in values.stated and values[key] != policys:
            values.refuse(key, f"the critic is trained as the policy: give {policys}, or leave it out")


def losses(values: Values, set_: Set) -> None:
    """The clipped loss and its relatives, by TRL's names."""
    kind = values.one_of(f"{_ACTOR}.loss_type", "default", "gspo", "gspo_token", "cispo", "sapo")
    mode = values.one_of(f"{_ACTOR}.loss_avg_mode", "token", "seq")
    low, high = values[f"{_ACTOR}.clip_ratio_low"], float(values[f"{_ACTOR}.clip_ratio_high"])
    if kind == "sapo":
        _sapo(values, set_, mode)
        return
    if kind == "cispo":
        set_("loss_type", "cispo", f"{_ACTOR}.loss_type")
        set_("epsilon_high", 1 + high, f"{_ACTOR}.clip_ratio_high")
        if low is not None:
            why = "theirs bounds the ratio of cispo from below too, TRL from above alone: give null for that"
            values.refuse(f"{_ACTOR}.clip_ratio_low", why)
        if mode != "token":
            values.refuse(f"{_ACTOR}.loss_avg_mode", "TRL's cispo is a mean over tokens: give token")
        return
    set_("epsilon", float(low), f"{_ACTOR}.clip_ratio_low")
    set_("loss_type", {"token": "dapo", "seq": "grpo"}[mode], f"{_ACTOR}.loss_type", f"{_ACTOR}.loss_avg_mode")
    if kind != "default":
        set_("importance_sampling_level", "sequence", f"{_ACTOR}.loss_type")
    set_("epsilon_high", high, f"{_ACTOR}.clip_ratio_high")
    set_("delta", float(values[f"{_ACTOR}.clip_ratio_dual"]), f"{_ACTOR}.clip_ratio_dual")


def _sapo(values: Values, set_: Set, mode: str) -> None:
    set_("loss_type", "sapo", f"{_ACTOR}.loss_type")
    set_("sapo_temperature_pos", float(values[f"{_ACTOR}.tau_positive"]), f"{_ACTOR}.tau_positive")
    set_("sapo_temperature_neg", float(values[f"{_ACTOR}.tau_negative"]), f"{_ACTOR}.tau_negative")
    if mode != "seq":
        values.refuse(f"{_ACTOR}.loss_avg_mode", "TRL's sapo is a mean over completions: give seq")


def divergence(values: Values, set_: Set) -> None:
    """The KL from the reference."""
    keys = {name: f"algorithm.{name}" for name in ("kl_coef", "kl_penalty", "use_kl_loss", "kl_type")}
    if values["algorithm.disable_kl"]:
        set_("kl_coef", 0.0, "algorithm.disable_kl")
        return
    in_loss = bool(values[keys["use_kl_loss"]])
    set_("kl_coef", float(values[keys["kl_coef"]]), keys["kl_coef"])
    set_("use_kl_loss", in_loss, keys["use_kl_loss"])
    set_("kl_penalty", values.one_of(keys["kl_penalty"], "kl", "abs", "mse", "low_var_kl"), keys["kl_penalty"])
    kind = values.one_of(keys["kl_type"], "fixed", "adaptive")
    set_("kl_type", "fixed" if in_loss else kind, keys["kl_type"])
    if in_loss or kind == "fixed":
        return
    set_("kl_target", float(values["algorithm.kl_target"]), "algorithm.kl_target")
    set_("kl_horizon", float(values["algorithm.kl_horizon"]), "algorithm.kl_horizon")


def filtering(values: Values, set_: Set) -> None:
    """Groups outside the bounds are left out, and further prompts drawn in their place."""
    key = "algorithm.online_filtering"
    set_("online_filtering", bool(values[key]), key)
    if not values[key]:
        return
    set_("filter_key", values["algorithm.filter_key"], "algorithm.filter_key")
    set_("filter_low", float(values["algorithm.filter_low"]), "algorithm.filter_low")
    set_("filter_high", float(values["algorithm.filter_high"]), "algorithm.filter_high")
    set_("dynamic_sampling", "resample", key)
    tries = values["trainer.max_try_make_batch"]
    set_("dynamic_sampling_max_rounds", tries - 1 if tries > 1 else 1000, "trainer.max_try_make_batch")
