"""Options of completions that are sampled from a perturbed image, and trained on the clean one (NoisyRollout)."""

import inspect
import math
from dataclasses import dataclass
from typing import Annotated, Any

from vgr_trl import registries
from vgr_trl.config.option import option
from vgr_trl.config.plugins import PERTURBATIONS, REMOVE_IMAGE
from vgr_trl.config.ranges import Natural, in_range, one_of
from vgr_trl.config.stages.perceive import PerceiveOptions
from vgr_trl.errors import ConfigError

DECAYS = ("none", "linear", "power", "exponential", "sigmoid")
_STRENGTHS = {  # perturbation -> the argument that grows with its strength
    "blacken_patches": "black_prob", "add_gaussian_noise": "std", "gaussian_blur": "radius", "diffusion_noise": "steps",
}  # fmt: skip


@dataclass
class NoisyOptions(PerceiveOptions):
    """Completions sampled from a perturbed image (NoisyRollout, https://huggingface.co/papers/2504.13055)."""

    noisy_generations: Natural = option(
        0,
        "Completions of each prompt that are sampled from a perturbed image and trained on the clean one "
        "(NoisyRollout), 0 to num_generations.",
    )
    noisy_perturbation: str = option(
        "diffusion_noise", "How images are perturbed for noisy_generations, as perturbation."
    )
    noisy_importance: Annotated[str, one_of("clean", "perturbed")] = option(
        "clean",
        "Image of the old log-probabilities of noisy_generations: clean, as published, or perturbed, that of the "
        "policy that generated (a scoring pass more).",
    )
    noisy_decay: Annotated[str, one_of(*DECAYS)] = option(
        "none", "How the noise falls over the run: none, linear, power, exponential or sigmoid."
    )
    noisy_decay_of: Annotated[str, one_of("strength", "generations", "both")] = option(
        "strength", "What noisy_decay lowers: strength, generations, or both."
    )
    noisy_decay_coef: Annotated[float, in_range(1e-9, 1e6, "above 0")] = option(
        30.0,
        "c of noisy_decay, above 0: 1 - s^c (power), 1 - c^(steps left), with c below 1 (exponential), 1 - sigmoid(c "
        "(s - midpoint)).",
    )
    noisy_decay_midpoint: Annotated[float, in_range(0, 1e9, "of at least 0")] = option(
        40.0, "Step at which the sigmoid decay is 1/2."
    )

    @property
    def noisy_perturbations(self) -> list[str]:
        """What images are perturbed by for generation: one perturbation, or none."""
        return [self.noisy_perturbation] if self.noisy_generations else []

    def noise_left(self, step: int, total: int) -> float:
        """Return how much of the noise is left in a step, in [0, 1].

        Args:
            step: from 1.
        """
        return decay(self.noisy_decay, step, total, self.noisy_decay_coef, self.noisy_decay_midpoint)

    def noisy_parameters(self, strength: float) -> dict[str, Any]:
        """Return the keyword arguments of the perturbation at a share of its strength, in [0, 1]."""
        parameters = dict(self.parameters_of(self.noisy_perturbation))
        if self.noisy_perturbation == "crop_image":
            parameters["share"] = 1 - (1 - parameters["share"]) * strength
        elif (name := _STRENGTHS.get(self.noisy_perturbation)) is not None:
            weaker = parameters[name] * strength
            parameters[name] = int(weaker) if name == "steps" else weaker
        elif self._takes_strength():
            parameters["strength"] = strength
        return parameters

    def _takes_strength(self) -> bool:
        function = registries.perturbations.load(self.noisy_perturbation)
        return "strength" in inspect.signature(function).parameters

    def check_noisy(self) -> None:
        """Raise `ConfigError` for values that do not go together."""
        if self.noisy_decay == "exponential" and self.noisy_decay_coef >= 1:
            raise ConfigError(
                f"noisy_decay_coef is {self.noisy_decay_coef} with noisy_decay exponential: give a number below 1, "
                "such as 0.95."
            )
        name = self.noisy_perturbation
        if name == REMOVE_IMAGE:
            raise ConfigError(f"noisy_perturbation is {name}, which changes the prompt: give one that changes images.")
        if name not in PERTURBATIONS:
            registries.perturbations.load(name)
        falls = self.noisy_generations and self.noisy_decay != "none" and self.noisy_decay_of != "generations"
        if falls and name not in (*_STRENGTHS, "crop_image") and not self._takes_strength():
            raise ConfigError(
                f"noisy_perturbation is {name}, which has no strength that noisy_decay could lower: give "
                "noisy_decay_of generations, or another perturbation."
            )


def decay(kind: str, step: int, total: int, coefficient: float, midpoint: float) -> float:
    """Return how much of the noise is left in a step, in [0, 1], as the code of NoisyRollout has it.

    With s = step / total: 1 (`none`), 1 - s (`linear`), 1 - s^c (`power`), 1 - c^(total - step) (`exponential`), or
    1 - 1 / (1 + exp(-c (s - midpoint / total))) (`sigmoid`).

    Args:
        kind: of `DECAYS`.
        step: from 1 to total.
        total: steps of the run.
        coefficient: c.
        midpoint: step.
    """
    share = step / total
    left = {
        "none": lambda: 1.0,
        "linear": lambda: 1 - share,
        "power": lambda: 1 - share**coefficient,
        "exponential": lambda: 1 - coefficient ** (total - step),
        "sigmoid": lambda: 1 / (1 + math.exp(min(coefficient * (share - midpoint / total), 700))),
    }[kind]()
    return float(min(max(left, 0.0), 1.0))
