"""Completions of a rollout, as TRL generates them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vgr_trl.batch.inputs import Prompts
from vgr_trl.compat.vllm_images import VLLMImages
from vgr_trl.errors import NotFiniteError
from vgr_trl.sharing import Place
from vgr_trl.signals import Measurement
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.generation.eval_sampling import sampling_of_mode
from vgr_trl.training.generation.noisy import with_noise
from vgr_trl.training.generation.server import named_server
from vgr_trl.training.host import Host
from vgr_trl.training.metrics.clock import StageClock
from vgr_trl.training.passes.around import Passes
from vgr_trl.training.rollout import Rollout


class Generation:
    """Generates with each prompt computed once, and measures attention meanwhile where that is its source.

    Args:
        vllm_images: how a colocated vLLM gets images; None: as they are.
    """

    def __init__(
        self,
        trainer: ConstructedTrainer,
        host: Host,
        measurement: Measurement,
        passes: Passes,
        place: Place,
        vllm_images: VLLMImages | None,
        clock: StageClock,
    ) -> None:
        self._trainer, self._host = trainer, host
        self._measurement, self._vllm_images = measurement, vllm_images
        self._passes, self._place, self._clock = passes, place, clock

    def run(
        self,
        rollout: Rollout | None,
        prompts: Prompts,
        num_generations: int,
        plain: Callable[[Any, Any, Any, int], Any],
    ) -> Any:
        """Return what TRL's `_generate_single_turn` does; the rollout keeps the prompts of its first turn.

        Args:
            num_generations: completions of each prompt, which are adjacent and alike to a server of vLLM.

        Raises:
            VLLMServerError: the server of vLLM does not answer.
        """
        model = self._trainer.model
        first_turn = rollout is not None and rollout.prompts is None
        if rollout is not None and first_turn:
            rollout.prompts = prompts
            prompts = with_noise(rollout, self._host)
            if rollout.noise is not None or rollout.blind:  # what is asked differs within a group
                num_generations = 1
        ids, images = prompts.ids, prompts.images
        if self._vllm_images is not None:
            ids, images = self._vllm_images.prepared(ids, images, prompts.fields)
        with (
            self._clock.stage("generation", model.training),
            self._passes.around(self._place, model),
            _finite_logits(self._host.state.global_step + 1),
            sampling_of_mode(self._trainer),
            named_server(self._trainer),
        ):
            if rollout is None or rollout.blind or not (first_turn and self._measurement.in_generation):
                return plain(ids, images, prompts.fields, num_generations)
            with self._measurement.generation_probe(model) as probe:
                generated = plain(ids, images, prompts.fields, num_generations)
            rollout.generated_mass = probe.mass
            return generated


@contextmanager
def _finite_logits(step: int) -> Iterator[None]:
    """Say in one sentence what sampling says of NaN; on a GPU the error is one of CUDA, which says nothing of it."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise NotFiniteError(
            f"The model's logits are NaN or infinite in generation, at step {step}: its weights are broken, or what it "
            "computes overflows, so look at the newest checkpoint, or use bfloat16 instead of float16."
        ) from error
