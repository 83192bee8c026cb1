"""Generate one turn: share prompts, perturb images, measure attention."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.patches.trl import override_sampling
from vgr_trl.patches.vllm import answers_of_server
from vgr_trl.pixel_check import refuse_dropped_images
from vgr_trl.pixels import image_tensors
from vgr_trl.rollout import ConstructedTrainer, Rollout
from vgr_trl.scoring_inputs import Prompts
from vgr_trl.signals.probe import GenerationProbe
from vgr_trl.signals.rollout_signals import RolloutSignals
from vgr_trl.views.noise import perturb_noisy_prompts


def generate(
    trainer: ConstructedTrainer,
    rollout: Rollout | None,
    prompts: Prompts,
    num_generations: int,
    plain: Callable[[Any, Any, Any, int], Any],
) -> Any:
    """Generate one turn as TRL's `_generate_single_turn` does; keep the prompts of the rollout's first turn.

    Args:
        trainer: gives model, options and measurements.
        rollout: the rollout of the batch; None outside of rollouts.
        prompts: prompts of this turn.
        num_generations: completions per prompt; a vLLM server gets the adjacent equal prompts of a group once.
        plain: TRL's method.

    Raises:
        VLLMServerError: the vLLM server does not answer.
    """
    model, measurement = trainer.model, trainer.measurement
    first_turn = rollout is not None and not hasattr(rollout, "prompts")
    if rollout is not None and first_turn:
        if trainer.pixels_unchecked and not rollout.blind:
            refuse_dropped_images(prompts, measurement.vision_token_ids)
        scores_all = measurement.scoring and not (measurement.samples and model.training)
        if scores_all and not trainer.use_vllm:  # scoring reads the same pixels on the device
            pixels = image_tensors(prompts.fields).get("pixel_values")
            fields = {} if pixels is None else {"pixel_values": trainer._prepare_input(pixels)}
            prompts = replace(prompts, fields={**prompts.fields, **fields})
        rollout.prompts = prompts
        prompts = perturb_noisy_prompts(trainer, rollout)
        if rollout.noise is not None or rollout.blind:  # prompts differ within a group
            num_generations = 1
    ids, images = prompts.ids, prompts.images
    if trainer.vllm_images is not None:
        ids, images = trainer.vllm_images.prepared(ids, images, prompts.fields)
    with (
        trainer.clock.stage("generation", model.training),
        trainer.passes.around(model, counts=model.training),
        override_sampling(trainer, eval_sampling(trainer.args, model.training)),
        answers_of_server(trainer) if trainer.use_vllm and trainer.args.vllm_mode == "server" else nullcontext(),
    ):
        measures = "attention" in measurement.needed and trainer.args.attention_source == "generate"
        if rollout is None or rollout.blind or not (first_turn and measures):
            return plain(ids, images, prompts.fields, num_generations)
        tokens = {"vision_token_ids": measurement.vision_token_ids, "special_token_ids": measurement.special_token_ids}
        with GenerationProbe(model, **tokens, temperature=trainer.temperature) as probe:
            generated = plain(ids, images, prompts.fields, num_generations)
        rollout.generated = RolloutSignals(probe.logps, probe.entropies, probe.mass.mask, probe.mass)
        return generated


def eval_sampling(args: DAPOConfig, training: bool) -> dict[str, float]:
    """Return the sampling options that override the training options: in evaluation only."""
    given = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    return {name: value for name, value in given.items() if value is not None and not training}
