"""Check once that prompts keep their images and that the model uses the pixels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers.utils import logging

from vgr_trl.engine_check import first_group
from vgr_trl.errors import DataError
from vgr_trl.metrics.collapse import ENGINE_BOUND
from vgr_trl.passes.run_pass import score
from vgr_trl.patching import keep_random_state
from vgr_trl.rollout import Rollout
from vgr_trl.rows import Prompts, scoring_inputs, take_rows
from vgr_trl.run import Run
from vgr_trl.signals.perturbation import perturb_images
from vgr_trl.signals.scoring import Want
from vgr_trl.views.perturbed_pass import inputs_with_other_images

logger = logging.get_logger(__name__)
UNCHANGED = 1e-5  # nats; smaller changes of all log-probabilities are rounding errors


@dataclass(frozen=True)
class PixelUse:
    """Differences of the log-probabilities of completions with an image, in nats.

    Attributes:
        tokens: number of compared tokens.
        change: mean |change| given a blank image.
        largest: largest |change| given a blank image.
        engine: mean distance between the engine's log-probabilities and the trainer's; None if the engine returns none.
        engine_blank: the same with the trainer's log-probabilities given a blank image.
    """

    tokens: int
    change: float
    largest: float
    engine: float | None = None
    engine_blank: float | None = None

    def describe(self) -> str:
        """Return a line for the log; it warns of an engine that is closer to the trainer without the image."""
        line = f"With a blank image, log-probabilities change by {self.change:.3g} nats per token"
        if self.engine is None:
            return line + "."
        line += f"; those of the engine are {self.engine:.3g} from the trainer's"
        if self.engine > ENGINE_BOUND:
            line += f", more than {ENGINE_BOUND}: compare its weights, chat template and image processor"
            if (self.engine_blank or 0) < self.engine:
                line += f". With a blank image they are {self.engine_blank:.3g} from the trainer's: it gets no images"
        return line + "."


def compare_logps(
    logps: torch.Tensor,
    blank: torch.Tensor,
    engine: torch.Tensor | None,
    mask: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> PixelUse:
    """Compare log-probabilities of completions given their images, given blank images, and of the engine.

    Args:
        logps: (N, T), given the images.
        blank: (N, T), given blank images.
        engine: (N, T), the engine's, NaN where undefined; None on every process: it returns none.
        mask: (N, T) bool, tokens to compare.
        gather: concatenates a tensor over all processes.
    """
    change = (blank - logps).abs()[mask]
    given = logps if engine is None else engine.to(logps)
    known = mask & given.isfinite()
    distances = [(given - other).abs()[known].sum() for other in (logps, blank)]
    sums = torch.stack([mask.sum().to(logps), change.sum(), known.sum().to(logps), *distances])
    largest = float(gather(change.max().view(1) if len(change) else logps.new_zeros(1)).max())
    tokens, changed, both, apart, apart_blank = gather(sums.unsqueeze(0)).double().sum(0).tolist()
    of_engine = (None, None) if engine is None or not both else (apart / both, apart_blank / both)
    return PixelUse(int(tokens), changed / max(tokens, 1), largest, *of_engine)


def check_pixel_use(run: Run, rollout: Rollout) -> dict[str, float] | None:
    """Score the first group with an image again given a blank image; log one line, and return metrics.

    Every process makes the same passes.

    Returns:
        None if the rollout has no token to compare, so that the next rollout has to be checked.

    Raises:
        DataError: no log-probability changes; on every process.
    """
    batch, accelerator, size = rollout.batch, run.accelerator, run.completions_per_prompt
    rows, compared = first_group(rollout, size)
    if not accelerator.gather(compared.sum().view(1)).any():
        return None
    part, inputs, why = take_rows(batch, rows), [], ""
    try:
        blank = partial(perturb_images, name="mask_image", seed=0, step=0)
        other, _ = inputs_with_other_images(run, rollout, rows, blank, size)
        inputs = [scoring_inputs(part), other]
    except DataError as error:
        why = f": {error}"
    if not accelerator.gather(torch.tensor([bool(inputs)], device=accelerator.device)).all():
        logger.warning_once(f"Skipped the check that the model uses the pixels{why}")
        return {}
    with keep_random_state(accelerator.device):  # separate passes: pixels are not joined
        logps, blank_logps = (score(run, given, Want()).logps.float() for given in inputs)
    engine = part.get("sampling_per_token_logps")
    use = compare_logps(logps, blank_logps, engine, compared.to(logps.device), accelerator.gather)
    if use.tokens and use.largest < UNCHANGED:
        unused = "tokens do not change with a blank image, so the model does not use its images"
        cure = "check that processor and model pass pixel_values on; check_pixels=False trains anyway"
        raise DataError(f"The log-probabilities of {use.tokens} {unused}: {cure}.")
    if accelerator.is_main_process:
        logger.warning(use.describe())
    return {"pixels/change": use.change}


def refuse_dropped_images(prompts: Prompts, vision_token_ids: Sequence[int]) -> None:
    """Raise `DataError` if a chat template drops images, so that their prompt has no placeholder token."""
    for ids, images in zip(prompts.ids, prompts.images or (), strict=False):
        if images and vision_token_ids and not set(vision_token_ids).intersection(ids):
            found = f"A prompt of {len(ids)} tokens has {len(images)} images, but no image token"
            cure = "use a chat template that writes images, or set check_pixels to False to train anyway"
            raise DataError(f"{found}: {cure}.")
