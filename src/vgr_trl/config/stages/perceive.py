"""Options of the perturbed image, and of the loss terms that use it."""

from dataclasses import dataclass
from typing import Annotated, Any

from vgr_trl import registries
from vgr_trl.config.option import option
from vgr_trl.config.plugins import PERTURBATIONS, REMOVE_IMAGE, PluginOptions
from vgr_trl.config.ranges import Fraction, PositiveInt, Share, Weight, at_least, check_list, in_range, one_of
from vgr_trl.errors import ConfigError
from vgr_trl.registries import VIEW

_Strength = Annotated[float, in_range(0, 1e6, "in [0, 1e6]")]


@dataclass
class PerceiveOptions(PluginOptions):
    """How an image is perturbed to see which tokens depend on it."""

    perturbation: str = option(
        "blacken_patches",
        f"How images are perturbed: {', '.join(PERTURBATIONS)}, those of installed packages, dotted paths "
        "or files (my_perturbations.py:my_perturbation).",
    )
    further_perturbations: list[str] | None = option(
        None, "Further perturbations for the dependency, in the same pass."
    )
    dependency_over: Annotated[str, one_of("mean", "min")] = option(
        "mean", "Of a token's dependencies under them, the mean or the min."
    )
    patch_size: PositiveInt = option(14, "Side of the squares of blacken_patches and shuffle_patches, in pixels.")
    black_prob: Share = option(0.5, "Probability that a square is blackened, in [0, 1].")
    noise_std: _Strength = option(189.0, "Standard deviation of add_gaussian_noise, on the scale 0 to 255.")
    blur_radius: _Strength = option(6.0, "Radius of gaussian_blur, in pixels.")
    diffusion_steps: Annotated[int, at_least(0), in_range(0, 999, "in [0, 999]")] = option(
        500, "Steps of diffusion_noise, 0 to 999."
    )
    crop_share: Fraction = option(0.5, "Share of an image that crop_image keeps, in (0, 1].")
    mask_value: Annotated[int, at_least(0), in_range(0, 255, "in [0, 255]")] = option(
        128, "Grey value of mask_image, 0 to 255."
    )
    perturb_per: Annotated[str, one_of("prompt", "completion")] = option(
        "prompt", "prompt: the completions of a prompt share one perturbed image; completion: one for each."
    )
    perception_loss_weight: Weight = option(
        0.0, "Weight of the implicit perception loss of PAPO, its gamma (a gradient pass of its own); 0: none."
    )
    der_loss_weight1: Weight = option(
        0.0, "Weight of the entropy term on the original image, eta 1 of PAPO's double entropy."
    )
    der_loss_weight2: Weight = option(
        0.0, "Weight of the entropy term on the perturbed image, eta 2 of PAPO's double entropy."
    )

    @property
    def perturbations(self) -> list[str]:
        """All that the dependency is measured under."""
        return [self.perturbation, *(self.further_perturbations or ())]

    @property
    def views(self) -> list[str]:
        """All perturbations that this run names, those that plug-ins read among them."""
        return list(dict.fromkeys([*self.perturbations, *self.read_views(False)]))

    def read_views(self, depends: bool) -> list[str]:
        """Return the perturbations under which completions are scored.

        Args:
            depends: whether something reads the dependency.
        """
        readers = self.readers()
        own = self.perturbations if depends or "views" in readers else [self.perturbation] * ("shift" in readers)
        read = [need.removeprefix(VIEW) for need in readers if need.startswith(VIEW)]
        return list(dict.fromkeys([*own, *read]))

    def parameters_of(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of a perturbation."""
        parameters: dict[str, dict[str, Any]] = {
            "blacken_patches": {"patch_size": self.patch_size, "black_prob": self.black_prob},
            "add_gaussian_noise": {"std": self.noise_std},
            "gaussian_blur": {"radius": self.blur_radius},
            "mask_image": {"value": self.mask_value},
            "shuffle_patches": {"patch_size": self.patch_size},
            "crop_image": {"share": self.crop_share},
            "diffusion_noise": {"steps": self.diffusion_steps},
            REMOVE_IMAGE: {},
        }
        if name in parameters:
            return parameters[name]
        own = self.plugin_values(registries.perturbations.load(name), name)
        return {} if own is self else dict(vars(own))

    @property
    def uses_perception_loss(self) -> bool:
        """Whether the loss has a term that needs gradients through the perturbed image."""
        return self.perception_loss_weight > 0 or self.der_loss_weight2 > 0

    def check_perceive(self) -> None:
        """Raise `ConfigError` for perturbations that cannot be used, and for a text in the place of names."""
        for name in ("credit_rules", "signals", "further_perturbations"):
            check_list(name, getattr(self, name))
        for name in self.views:
            if name not in PERTURBATIONS:
                registries.perturbations.load(name)
        if len(set(self.perturbations)) < len(self.perturbations):
            raise ConfigError(f"further_perturbations is {self.further_perturbations}: give each perturbation once.")
        if self.uses_perception_loss and self.perturbation == REMOVE_IMAGE:
            raise ConfigError(
                f"perturbation is {REMOVE_IMAGE} with perception_loss_weight or der_loss_weight2, whose pass takes the "
                "same prompts with other images: give another perturbation, and this one as further_perturbations."
            )
