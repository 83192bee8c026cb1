"""Check that an engine's log-probabilities match the trainer's, prompts keep images and the model uses pixels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.utils import logging

from vgr_trl.batch import Batch, Prompts
from vgr_trl.checkpoints import SavedState
from vgr_trl.errors import DataError, EngineError
from vgr_trl.metrics.collapse import ENGINE_BOUND
from vgr_trl.passes.run_pass import score
from vgr_trl.patching import keep_random_state, patched_attribute
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.signals.perturbation import perturb_images
from vgr_trl.signals.scoring import Want
from vgr_trl.views.perturbed_pass import batch_with_other_images

GROWTH = 10  # a distance above the limit and above GROWTH times the first distance ends the run


class EngineCheck(SavedState):
    """Compares, in each rollout, the completions of one prompt with an image per process.

    Attributes:
        limit: `engine_distance_limit`.
        first: engine distance of the run's first rollout; None before it.
    """

    kind = "engine"

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.first: float | None = None

    def check(self, run: Run, rollout: Rollout) -> dict[str, float]:
        """Return the engine distance as a metric, the largest of all processes; every process calls this.

        Raises:
            EngineError: the distance is too large; raised on every process.
        """
        batch, device = rollout.batch, run.accelerator.device
        engine = batch.columns.get("engine_logps")
        if engine is None or rollout.engine_logps is None:  # if moved out, the training pass compares them
            return {}
        logps = batch.old_logps
        if logps is None and rollout.scores is not None:
            logps = rollout.scores.logps.to(device)
        rows, compared = first_group(rollout, run.completions_per_prompt, logps)
        scored = score(run, batch.take(rows), Want()).logps if logps is None else logps[list(rows)]
        distance = torch.tensor([engine_distance(engine[list(rows)], scored, compared)], device=device)
        largest = float(run.accelerator.gather(distance).max())
        if largest < 0:
            return {}
        return self.judge(largest, run.step + 1)

    def judge(self, distance: float, step: int) -> dict[str, float]:
        """Return a distance as a metric, unless it is above the limit and above `GROWTH` times the first distance.

        The first distance counts as at most the limit: an engine that is wrong from the start ends the run if its
        distance is above `GROWTH` times the limit.

        Raises:
            EngineError: the distance is too large.
        """
        self.first = distance if self.first is None else self.first
        if distance > max(self.limit, GROWTH * min(self.first, self.limit)):
            gap = f"{distance:.3g} nats per token from the trainer's in step {step}, {self.first:.3g} at first"
            cure = "it has other weights, images or prompts, so resume with the engine started anew, or without it"
            raise EngineError(f"The engine's log-probabilities are {gap}: {cure} (engine_distance_limit 0: train on).")
        return {"engine/distance": distance}

    def state_dict(self) -> dict[str, Any]:
        """Return the first distance, the same on all processes."""
        return {"first": self.first}

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Compare with the first rollout of the run that is resumed."""
        self.first = states[0]["first"]


def first_group(rollout: Rollout, size: int, scored: Tensor | None = None) -> tuple[range, Tensor]:
    """Return the rows of the first prompt with an image and valid tokens, and their tokens to compare, (N', T) bool.

    Args:
        rollout: completions to choose from; completions of perturbed images are excluded.
        size: G.
        scored: (N, T), NaN for tokens to exclude; None: no further tokens are excluded.
    """
    valid, has_images = rollout.batch.valid, rollout.batch.has_images
    compared = valid & has_images.to(valid.device).unsqueeze(1)  # (N, T)
    if rollout.noise is not None:
        compared &= ~torch.tensor(rollout.noise.rows, device=compared.device).unsqueeze(1)
    if scored is not None:
        compared &= ~scored.isnan()
    count = len(compared)
    start = min(int(compared.any(1).int().argmax()), max(count - size, 0))
    rows = range(start, min(start + size, count))
    return rows, compared[rows.start : rows.stop]


def engine_distance(engine: Tensor, logps: Tensor, compared: Tensor) -> float:
    """Return the mean distance of log-probabilities (N, T) over compared tokens, (N, T) bool; -1 without any.

    Tokens for which the engine returns NaN are left out; if it returns nothing else, the distance is infinite.
    """
    distances = (engine.to(logps) - logps).abs().float()[compared.to(logps.device)]
    finite = distances[distances.isfinite()]
    return float(finite.mean()) if len(finite) else math.inf if len(distances) else -1.0


def generate_with_logps(causal: Any, temperature: float, plain: Callable[[], Any]) -> Any:
    """Generate completions and return their log-probabilities, for which TRL does not ask `generate`.

    Args:
        causal: transformers model that generates.
        temperature: divides the scores.
        plain: generates.
    """
    steps = list[Tensor]()
    make: Any = causal._get_logits_processor

    def select(tokens: Tensor) -> None:  # from the newest distribution, (N, vocabulary)
        if steps:
            steps[-1] = steps[-1].gather(1, tokens.unsqueeze(1))

    def read(ids: Tensor, scores: Tensor) -> Tensor:
        select(ids[:, -1])
        steps.append((scores.float() / temperature).log_softmax(-1))
        return scores

    def add_reader(*args: Any, **options: Any) -> Any:
        steps.clear()  # the call before has filled a shared cache
        return LogitsProcessorList([read, *make(*args, **options)])

    with patched_attribute(causal, "_get_logits_processor", add_reader):
        completion_ids, _ = plain()
    last = [ids[-1] if len(ids) == len(steps) else 0 for ids in completion_ids]
    select(torch.tensor(last, device=steps[-1].device))
    logps = torch.cat(steps, 1).tolist()
    return completion_ids, [values[: len(ids)] for values, ids in zip(logps, completion_ids, strict=True)]


logger = logging.get_logger(__name__)
UNCHANGED = 1e-5  # nats; smaller changes of all log-probabilities are rounding errors


@dataclass(frozen=True)
class PixelUse:
    """Differences of the log-probabilities of completions with an image, in nats.

    Attributes:
        tokens: number of compared tokens.
        change: mean |change| under a blank image.
        largest: largest |change| under a blank image.
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
    """Compare the trainer's log-probabilities given the images with those given blank images and the engine's.

    Args:
        logps: (N, T), given the images.
        blank: (N, T), given blank images.
        engine: (N, T), the engine's, NaN where undefined; None on every process: it returns none.
        mask: (N, T) bool, tokens to compare.
        gather: concatenates a tensor over all processes.
    """
    change = (blank - logps).abs()[mask]
    sampled = logps if engine is None else engine.to(logps)
    is_finite = mask & sampled.isfinite()
    distances = [(sampled - reference).abs()[is_finite].sum() for reference in (logps, blank)]
    sums = torch.stack([mask.sum().to(logps), change.sum(), is_finite.sum().to(logps), *distances])
    largest = float(gather(change.max().view(1) if len(change) else logps.new_zeros(1)).max())
    tokens, changed, num_finite, apart, apart_blank = gather(sums.unsqueeze(0)).double().sum(0).tolist()
    of_engine = (None, None) if engine is None or not num_finite else (apart / num_finite, apart_blank / num_finite)
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
    part, pair, why = batch.take(rows), list[Batch](), ""
    try:
        blank = partial(perturb_images, name="mask_image", seed=0, step=0)
        blank_batch, _ = batch_with_other_images(run, rollout, rows, blank, size)
        pair = [part, blank_batch]
    except DataError as error:
        why = f": {error}"
    if not run.all_agree(bool(pair)):
        logger.warning_once(f"Skipped the check that the model uses the pixels{why}")
        return {}
    with keep_random_state(accelerator.device):  # separate passes: pixels are not joined
        logps, blank_logps = (score(run, variant, Want()).logps.float() for variant in pair)
    engine = part.columns.get("engine_logps")
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
            problem = f"A prompt of {len(ids)} tokens has {len(images)} images, but no image token"
            cure = "use a chat template that writes images, or set check_pixels to False to train anyway"
            raise DataError(f"{problem}: {cure}.")
