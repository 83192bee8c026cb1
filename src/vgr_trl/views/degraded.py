"""Degrade the images of training rollouts, so that rollout, loss, rewards and records see less than a teacher."""

from functools import partial
from typing import Any

import numpy as np

from vgr_trl.data.images import IMAGE_COLUMNS, ORIGINAL_IMAGES, images_of
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.signals.perturbation import derive_seed, perturb_images

_STREAM = 10**6  # random numbers apart from those of other perturbations, which count images from 0


def degrade_rows(run: Run, rollout: Rollout) -> list[dict[str, Any]]:
    """Return the rows of a training rollout with degraded images, and `original_images`, which the view shows.

    All completions of a prompt get the same images, on any process.

    Args:
        run: options and step.
        rollout: not generated yet; it gets a metric.
    """
    args, state, size = run.args, run.get_state(), run.completions_per_prompt
    if not args.degraded_by or not run.trains:
        return rollout.rows
    step = state.global_step + 1
    strength = args.degraded_strength(step, max(state.max_steps, step))
    parameters = args.weakened_parameters(args.degraded_by, strength)
    rollout.metrics["degraded/strength"] = strength
    shown: dict[int, list[Any]] = {}  # number of the prompt -> its images
    rows = []
    for number, row in ((number // size, row) for number, row in enumerate(rollout.rows, rollout.first)):
        originals = images_of(row)
        if number not in shown:
            place: Any = {"seed": args.seed, "step": step, "index": number}
            drawn = np.random.default_rng(derive_seed(**place, image=_STREAM)).random()
            change = partial(perturb_images, name=args.degraded_by, parameters=parameters, first=_STREAM + 1, **place)
            shown[number] = originals if drawn < args.degraded_untouched else change(images=originals)
        images, present = shown[number], [name for name in IMAGE_COLUMNS if row.get(name)]
        columns = {name: images if isinstance(row[name], list) else images[0] for name in present}
        rows.append(row | columns | {ORIGINAL_IMAGES: originals})
    return rows
