"""Sample some completions of each prompt from perturbed images (NoisyRollout)."""

from functools import partial

import torch

from vgr_trl.errors import DataError
from vgr_trl.passes.run_pass import Purpose
from vgr_trl.pixels import joined
from vgr_trl.rollout import ConstructedTrainer, Noise, Rollout, weighted_sums
from vgr_trl.rows import OLD_LOGPS
from vgr_trl.scoring_inputs import Prompts, pixels_of_rows, scoring_inputs
from vgr_trl.signals.perturbation import perturb_images
from vgr_trl.signals.scoring import Want
from vgr_trl.views.conversations import perturb_prompts


def perturb_noisy_prompts(trainer: ConstructedTrainer, rollout: Rollout) -> Prompts:
    """Perturb the images of some prompts of a rollout; return the prompts to sample from.

    The last completions of each prompt see the same perturbed images, on any process. The rollout keeps the prompts.

    Raises:
        DataError: a perturbed image has other tokens than the image.
    """
    args, prompts, state = trainer.args, rollout.prompts, trainer.state
    if not args.noisy_generations or not trainer.model.training or rollout.greedy or rollout.blind:
        return prompts
    step = state.global_step + 1
    left = args.noise_left(step, max(state.max_steps, step))
    count = args.noisy_generations if args.noisy_decay_of == "strength" else round(args.noisy_generations * left)
    strength = 1.0 if args.noisy_decay_of == "generations" else left
    size, first = trainer.completions_per_prompt, trainer.accelerator.process_index * len(rollout.rows)
    noisy = noisy_rows(len(rollout.rows), size, count, first)
    rollout.noise = Noise(noisy, count, strength)
    trainer._log_completion_extra("noisy", noisy)
    if not any(noisy) or prompts.images is None:  # another process may have noisy rows with images
        return prompts
    parameters = args.noisy_parameters(strength)
    perturb = partial(perturb_images, name=args.noisy_perturbation, parameters=parameters, seed=args.seed, step=step)
    numbers = [(first + row) // size for row in range(len(rollout.rows))]
    perturbed, own = perturb_prompts(rollout.messages, numbers, perturb)
    seen = [perturbed[own[row]] if is_noisy else rollout.messages[row] for row, is_noisy in enumerate(noisy)]
    shown = trainer.tokenize(seen)
    if [list(ids) for ids in shown.ids] != [list(ids) for ids in prompts.ids]:
        found = f"Images perturbed by {args.noisy_perturbation} give other image tokens than the originals"
        raise DataError(f"{found}: set noisy_generations to 0 for this processor.")
    rollout.noise.prompts = shown
    return shown


def noisy_rows(rows: int, generations: int, count: int, first: int) -> list[bool]:
    """Return the noisy rows of a process, one bool per row: the last `count` completions of each prompt.

    Args:
        rows: rows of this process.
        generations: completions per prompt.
        count: noisy completions per prompt.
        first: number of the first row over all processes.
    """
    return [(first + row) % generations >= generations - count for row in range(rows)]


def record_noise(trainer: ConstructedTrainer, rollout: Rollout) -> None:
    """Set the old log-probabilities of a noisy rollout by `noisy_importance`, and its metrics."""
    noise, args = rollout.noise, trainer.args
    if noise is None:
        return
    if noise.generations and args.noisy_importance == "perturbed":
        batch, seen = rollout.batch, noise.prompts
        if seen is not None and seen.images is not None:
            pixels = pixels_of_rows(seen.fields, seen.images, range(len(rollout.rows)), batch)
            batch = batch | {"pixel_values": joined(pixels)}
        scores = trainer.score(scoring_inputs(batch), Want(), purpose=Purpose.VIEW)
        rollout.batch = rollout.batch | {OLD_LOGPS: scores.logps}
    rollout.metrics |= {"noisy/generations": float(noise.generations), "noisy/strength": noise.strength}
    if noise.generations:
        rewards = weighted_sums(rollout.rewards, trainer.reward_weights).nan_to_num()  # (N of all,)
        rows = noisy_rows(len(rewards), trainer.completions_per_prompt, noise.generations, 0)
        noisy = torch.tensor(rows, device=rewards.device)
        rollout.metrics["noisy/reward"] = rewards[noisy].mean().item()
        rollout.metrics["noisy/reward_clean"] = rewards[~noisy].mean().item()
