"""Select the groups of a rollout that are trained on: drop, resample and replay zero-variance groups.

All tensors about groups are of all processes, prompt-major, so that every process finds the same groups.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers.utils import logging

from vgr_trl.advantages import estimate_advantages
from vgr_trl.patches.trl import replace_newest
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.rows import OLD_LOGPS
from vgr_trl.sampling.dynamic_sampling import resample
from vgr_trl.sampling.groups import Group, correct_num_items, cut_groups, fill_old_logps, insert_groups
from vgr_trl.sampling.zero_variance import find_zero_variance

logger = logging.get_logger(__name__)


def select_groups(trainer: ConstructedTrainer, rollout: Rollout) -> dict[str, float]:
    """Replace zero-variance groups of a rollout by further or replayed ones, where that is on; return metrics."""
    args, replay, metrics = trainer.args, trainer.replay, dict[str, float]()
    selection = find_zero_variance(trainer, rollout)
    rounds, chosen = [rollout], dict[int, tuple[Rollout, int]]()
    if args.dynamic_sampling == "resample":
        chosen, metrics = resample(trainer, rounds)
    trained = len(selection.kept) + len(chosen)
    sentence = trainer.zero_variance_streak.end_rollout(trainer.state.global_step, trained)
    if sentence is not None and trainer.accelerator.is_main_process:
        logger.warning(sentence)
    if not trainer.selects_groups:
        rollout.with_gradient = selection.rows_with_gradient()
        return {}
    missing = [group for group in selection.dropped if group not in chosen]
    replayed = {} if replay is None else dict(zip(missing, replay.draw(len(missing)), strict=False))
    is_of_batch = args.advantage_estimator == "grpo" and trainer.scale_rewards == "batch"
    if args.advantage_estimator == "reinforce_plus_plus" or (
        is_of_batch and (chosen or replayed or selection.filtered)
    ):
        replayed = divide_by_one_deviation(trainer, rounds, chosen, replayed)
    stored = {"pad_token_id": trainer._tokenizer.pad_token_id, "step": trainer.state.global_step}
    fresh = {place: cut_groups(source, [number], **stored)[0] for place, (source, number) in chosen.items()}
    if replay is not None:
        fresh = {place: fill_old_logps(group) for place, group in fresh.items()}
        replay.keep(trainer, rollout, fresh)
    replacements = fresh | replayed
    if replacements:
        batch = rollout.batch
        if replayed and OLD_LOGPS not in batch and rollout.signals is not None:
            # Stored groups have old log-probabilities; TRL leaves them out of an on-policy batch.
            batch = {**batch, OLD_LOGPS: rollout.signals.logps}
        rollout.batch, rollout.signals = insert_groups(
            batch,
            replacements,
            selection.placement,
            pad_token_id=trainer._tokenizer.pad_token_id,
            pad_to_multiple_of=trainer.pad_to_multiple_of or None,
            signals=rollout.signals,
        )
        rollout.batch = correct_num_items(rollout.batch, trainer.accelerator.gather)
    num_groups = selection.placement.num_groups
    if replay is not None:
        metrics |= replay.metrics(len(replayed) / num_groups)
    metrics["sampling/nonzero_variance_fraction"] = (trained + len(replayed)) / num_groups
    rollout.with_gradient, rollout.replaced = selection.rows_with_gradient(replacements), sorted(replacements)
    # A filtered group that nothing replaces has rewards that differ; without this it would be trained on.
    advantages = rollout.batch["advantages"]
    rollout.batch = {**rollout.batch, "advantages": advantages * rollout.with_gradient.to(advantages.device)}
    return metrics


def divide_by_one_deviation(
    trainer: ConstructedTrainer,
    rounds: list[Rollout],
    chosen: Mapping[int, tuple[Rollout, int]],
    replayed: Mapping[int, Group],
) -> dict[int, Group]:
    """Divide the advantages of all rounds by the deviation over the groups that are trained on.

    Used for `reinforce_plus_plus`, and for `scale_rewards batch`, which counts and divides replayed groups too. A
    filtered group that nothing replaces is not trained on, and does not count.

    Returns:
        the replayed groups.
    """
    estimator, selections = trainer.args.advantage_estimator, [rollout.selection for rollout in rounds]
    first, size = selections[0], selections[0].placement.num_generations
    own = torch.ones(first.placement.num_groups, dtype=torch.bool, device=first.rewards.device)
    own[[*first.filtered, *chosen, *replayed]] = False
    rewards = [first.rewards.view(-1, size)[own].flatten()]
    rewards += [source.selection.rewards.view(-1, size)[number] for source, number in chosen.values()]
    if estimator == "grpo":
        rewards += [group.rewards.to(first.rewards) for group in replayed.values()]
    trained = torch.cat(rewards)

    def divided(rewards: torch.Tensor) -> torch.Tensor:
        return estimate_advantages(rewards, size, estimator, trained=trained.to(rewards.device))

    for selection in selections:
        selection.advantages = divided(selection.rewards)
    rounds[0].batch = {**rounds[0].batch, "advantages": first.local_advantages}
    every = [value for selection in selections for value in selection.advantages.tolist()]
    replace_newest(trainer._logs["advantages"], every)
    if estimator != "grpo":
        return dict(replayed)
    return {place: replace(group, advantages=divided(group.rewards)) for place, group in replayed.items()}
