"""Completions sampled from a perturbed image, and trained on the clean one."""

from functools import partial
from typing import Any

import torch

from vgr_trl.batch.inputs import Prompts, joined, pixels_of_rows, scoring_inputs
from vgr_trl.errors import DataError
from vgr_trl.signals import perturb_images
from vgr_trl.signals.perturbation.conversations import perturbed_prompts
from vgr_trl.training.choice.replay import OLD_LOGPS
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Noise, Rollout, weighted_sums


def with_noise(rollout: Rollout, host: Host) -> Prompts:
    """Return the prompts of a rollout as they are to be generated from; the rollout keeps them.

    The last completions of each prompt get one perturbed image, whichever process they are on.

    Raises:
        DataError: a perturbed image makes other tokens than the image itself.
    """
    args, prompts = host.args, rollout.prompts
    assert prompts is not None
    if not args.noisy_generations or host.mode != "train" or rollout.greedy or rollout.blind:
        return prompts
    step = host.state.global_step + 1
    left = args.noise_left(step, max(host.state.max_steps, step))
    count, strength = args.noisy_generations, 1.0
    if args.noisy_decay_of != "strength":
        count = round(count * left)
    if args.noisy_decay_of != "generations":
        strength = left
    first = host.accelerator.process_index * len(rollout.rows)
    noisy = noisy_rows(len(rollout.rows), host.num_generations, count, first)
    rollout.noise = Noise(noisy, count, strength)
    host.show_columns({"noisy": noisy})
    if not any(noisy) or prompts.images is None:  # another process may have images
        return prompts
    assert rollout.messages is not None
    perturb = partial(
        perturb_images,
        name=args.noisy_perturbation,
        parameters=args.noisy_parameters(strength),
        seed=args.seed,
        step=step,
    )
    numbers = [(first + row) // host.num_generations for row in range(len(rollout.rows))]
    perturbed, own = perturbed_prompts(rollout.messages, numbers, perturb)
    seen = [
        perturbed[own[row]] if is_noisy else conversation
        for row, (conversation, is_noisy) in enumerate(zip(rollout.messages, noisy, strict=True))
    ]
    shown = host.tokenize(seen)
    if [list(ids) for ids in shown.ids] != [list(ids) for ids in prompts.ids]:
        raise DataError(
            f"Images perturbed by {args.noisy_perturbation} make other tokens than the images themselves: switch "
            "noisy_generations off for this processor."
        )
    rollout.noise.prompts = shown
    return shown


def noisy_rows(rows: int, generations: int, count: int, first: int) -> list[bool]:
    """Return which rows of a process are noisy: the last `count` completions of each prompt.

    Args:
        first: number of the first row among those of all processes.
    """
    return [(first + row) % generations >= generations - count for row in range(rows)]


def as_generated(rollout: Rollout, host: Host) -> Rollout:
    """Return the rollout with the old log-probabilities that `noisy_importance` says, and metrics of the noise."""
    noise = rollout.noise
    if noise is None:
        return rollout
    if noise.generations and host.args.noisy_importance == "perturbed":
        rollout.batch = {**rollout.batch, OLD_LOGPS: host.score(scoring_inputs(_as_shown(rollout, noise)))}
    rollout.metrics = rollout.metrics | _metrics(rollout, host, noise)
    return rollout


def _as_shown(rollout: Rollout, noise: Noise) -> dict[str, Any]:
    """The batch with the images that each row was generated from."""
    if noise.prompts is None or noise.prompts.images is None:
        return rollout.batch
    rows = range(len(rollout.rows))
    pixels = pixels_of_rows(noise.prompts.fields, noise.prompts.images, rows, rollout.batch)
    return rollout.batch | {"pixel_values": joined(pixels)}


def _metrics(rollout: Rollout, host: Host, noise: Noise) -> dict[str, float]:
    found = {"noisy/generations": float(noise.generations), "noisy/strength": noise.strength}
    if rollout.rewards is None or not noise.generations:
        return found
    rewards = weighted_sums(rollout.rewards, host.reward_weights).nan_to_num()  # (N of all,)
    noisy = torch.tensor(noisy_rows(len(rewards), host.num_generations, noise.generations, 0), device=rewards.device)
    return found | {
        "noisy/reward": rewards[noisy].mean().item(),
        "noisy/reward_clean": rewards[~noisy].mean().item(),
    }
