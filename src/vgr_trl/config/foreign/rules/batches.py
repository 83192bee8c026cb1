"""Batches, and everything that is counted in steps: theirs are rollouts, ours updates."""

from vgr_trl.config.foreign.rules.values import Set, Values
from vgr_trl.errors import ConfigError

_NEVER = 10**9
_ROLLOUT, _UPDATE = "data.rollout_batch_size", "worker.actor.global_batch_size"
_MICRO = "worker.actor.micro_batch_size_per_device_for_update"


def batches(values: Values, set_: Set) -> None:
    """The same completions in a micro-batch, an update and a rollout, on however many processes."""
    n, micro = values.whole("worker.rollout.n"), values.whole(_MICRO)
    if n < 2:
        why = "TRL takes at least 2 completions of a prompt, with a critic too: give worker.rollout.n=8, for example"
        values.refuse("worker.rollout.n", why)
    rollout, update = values.whole(_ROLLOUT) * n, values.whole(_UPDATE) * n
    while _MICRO not in values.stated and micro > 1 and update % (micro * values.processes):
        micro -= 1
    at_once = micro * values.processes
    if update % at_once:
        raise ConfigError(
            f"An update takes {update} completions ({_UPDATE} · worker.rollout.n), which {values.processes} processes "
            f"with {micro} at a time ({_MICRO}) cannot share evenly: change one of the three."
        )
    set_("num_generations", n, "worker.rollout.n")
    set_("per_device_train_batch_size", micro, _MICRO)
    set_("gradient_accumulation_steps", update // at_once, _UPDATE)
    set_("steps_per_generation", rollout // at_once, _ROLLOUT)


def schedule(values: Values, set_: Set) -> None:
    """Lengths and intervals in our steps."""
    updates = values.updates
    if values["trainer.max_steps"] is not None:
        set_("max_steps", values.whole("trainer.max_steps") * updates, "trainer.max_steps")
    else:
        set_("num_train_epochs", values.whole("trainer.total_epochs"), "trainer.total_epochs")
    set_("logging_steps", updates)
    save = values["trainer.save_freq"]
    set_("save_strategy", "steps" if save > 0 else "no", "trainer.save_freq")
    if save > 0:
        set_("save_steps", save * updates, "trainer.save_freq")
    limit = values["trainer.save_limit"]
    if limit is not None and limit > 0:
        set_("save_total_limit", limit, "trainer.save_limit")
    if values["worker.actor.optim.lr_warmup_steps"] not in (None, -1):
        warmup = values.whole("worker.actor.optim.lr_warmup_steps", 0)
        set_("warmup_steps", warmup * updates, "worker.actor.optim.lr_warmup_steps")
    else:
        set_("warmup_ratio", float(values["worker.actor.optim.lr_warmup_ratio"]), "worker.actor.optim.lr_warmup_ratio")


def evaluations(values: Values, set_: Set) -> None:
    """When is evaluated, and how completions are sampled then; theirs also does it at the end, as ours."""
    key, sampling = "trainer.val_freq", "worker.rollout.val_override_config"
    given = dict(values[sampling] or {})
    n = given.pop("n", 1)
    if given.pop("do_sample", True) is False:
        given["temperature"] = 0
    temperature, top_p = given.pop("temperature", None), given.pop("top_p", None)
    if given and any(value != -1 for value in given.values()):
        values.stop(sampling, f"evaluations have no {', '.join(given)} of their own")
    has_data = bool(values["data.val_files"])
    if not has_data or not (values[key] > 0 or values["trainer.val_before_train"]):
        set_("eval_strategy", "no", key)
        return
    set_("eval_strategy", "steps", key)
    set_("eval_steps", values[key] * values.updates if values[key] > 0 else _NEVER, key)
    set_("eval_on_start", bool(values["trainer.val_before_train"]), "trainer.val_before_train")
    set_("num_generations_eval", n, sampling)
    set_("per_device_eval_batch_size", n * max(1, values.whole(_MICRO) // n))
    if temperature is not None:
        set_("eval_temperature", temperature, sampling)
    if top_p is not None and temperature != 0:
        set_("eval_top_p", top_p, sampling)
