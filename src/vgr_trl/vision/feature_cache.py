"""Keep the image features of a frozen vision tower during a rollout, and process equal images once."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from typing import Any

import torch
import xxhash
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from PIL import Image
from torch import nn
from transformers import BatchFeature

from vgr_trl.patching import patched_method
from vgr_trl.pixels import IMAGE_INPUTS, Images, UnknownParts, find_layout, fingerprint, image_inputs_of, stack_images
from vgr_trl.sharing.model_support import base_of, causal_model, has_active_dropout


def parts_of_tower(base: Any) -> list[nn.Module]:
    """Return the modules of a base model beside its decoder: vision tower and merger."""
    decoder = getattr(base, "language_model", None)
    return [] if decoder is None else [module for module in base.children() if module is not decoder]


def parameters_of_tower(base: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of tower and merger, and of the base model itself (the newline of LLaVA-NeXT)."""
    own = base.parameters(recurse=False)
    return chain(own, chain.from_iterable(part.parameters() for part in parts_of_tower(base)))


def tower_trains(base: Any) -> bool:
    """Whether a parameter of tower or merger is trained, adapters included."""
    return any(parameter.requires_grad for parameter in parameters_of_tower(base))


# Families whose decoders read nothing of images but their features (tested with transformers 5.23).
FAMILIES = frozenset({
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma3", "llava", "llava_next",
    "internvl", "mistral3", "paligemma",
})  # fmt: skip

Form = tuple[type, bool, bool]  # class of outputs; whether pooled and deepstack features are one tensor each
Features = list[torch.Tensor]  # of an image: pooled features and those of each deepstack layer, (tokens, D) each


class VisionCache:
    """Keeps the image features of a policy during a rollout; its text says whether it does.

    A separate reference model computes its own features: its weights may differ, and it scores a rollout once.

    Args:
        base: base model (without head) of the policy.
        megabytes: capacity; features beyond it are computed in every pass.
        reason: why all features are computed in every pass; None: they are kept.
    """

    def __init__(self, base: Any, megabytes: int, reason: str | None = None) -> None:
        self.base, self.megabytes, self.reason = base, megabytes, reason
        self._kept: dict[Hashable, Features] = {}
        self._bytes = self._wanted = self._computed = 0
        self._form: Form

    def __str__(self) -> str:
        where = "once per rollout" if self.reason is None else f"in every pass ({self.reason})"
        return f"vision_cache_megabytes={self.megabytes}: image features are computed {where}"

    def clear(self) -> None:
        """Drop all features at the start of a rollout."""
        self._kept.clear()
        self._bytes = 0

    @contextmanager
    def around(self, model: Any, *, counts: bool = True) -> Iterator[None]:
        """Compute the features of each image once in passes of this block.

        Args:
            model: transformers model, also wrapped; models other than the policy compute their own features.
            counts: whether `metrics` counts these passes.
        """
        if self.reason is not None or base_of(causal_model(model)) is not self.base or tower_trains(self.base):
            yield
            return
        plain, before = self.base.get_image_features, (self._wanted, self._computed)
        names = list(signature(plain).parameters)

        def features(*args: Any, **kwargs: Any) -> Any:
            return self._complete_outputs(plain, dict(zip(names, args, strict=False)) | kwargs)

        with patched_method(self.base, "get_image_features", features):
            yield
        if not counts:
            self._wanted, self._computed = before

    def metrics(self) -> dict[str, float]:
        """Return the share of images whose features were computed since the last call; empty without images."""
        found = {"vision/computed_per_image": self._computed / self._wanted} if self._wanted else {}
        self._wanted = self._computed = 0
        return found

    def _complete_outputs(self, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Return outputs of `get_image_features`, as far as decoders read them."""
        images = _separate_images(arguments)
        if images is None:
            return plain(**arguments)
        keys = [tuple((name, fingerprint(value)) for name, value in image.items()) for image in images]
        missing = {key: image for key, image in zip(keys, images, strict=True) if key not in self._kept}
        self._wanted, self._computed = self._wanted + len(keys), self._computed + len(missing)
        found = {key: self._kept[key] for key in keys if key in self._kept}
        if missing:
            inputs = {name: torch.cat([image[name] for image in missing.values()]) for name in images[0]}
            with torch.no_grad():  # transformers may have marked the patches of a frozen tower
                outputs = plain(**{**arguments, **inputs})
            self._form, computed = _split_outputs(outputs)
            for key, features in zip(missing, computed, strict=True):
                found[key] = features
                self._keep(key, features)
        return _join_features([found[key] for key in keys], *self._form)

    def _keep(self, key: Hashable, features: Features) -> None:
        size = sum(part.nbytes for part in features)
        if self._bytes + size <= self.megabytes * 2**20:
            self._kept[key] = features
            self._bytes += size


def why_not_once(base: Any) -> str | None:
    """Return why the image features of a base model cannot be kept during a rollout; None: they can."""
    if base.config.model_type not in FAMILIES or not hasattr(base, "get_image_features") or not parts_of_tower(base):
        return f"not tested with models of the type {base.config.model_type}"
    if tower_trains(base):
        return "the vision tower trains"
    modules = [module for part in parts_of_tower(base) for module in part.modules()]
    if any(isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) for module in modules):
        return "adapters in the vision tower, which the reference may leave out"
    draws = any(has_active_dropout(part, when_training=True) for part in parts_of_tower(base))
    return "dropout in the vision tower" if draws else None


def _separate_images(arguments: Mapping[str, Any]) -> list[Images] | None:
    """Return the pixel inputs of each image or tile passed to `get_image_features`; None: they cannot be separated."""
    given = image_inputs_of(arguments)
    if any(isinstance(value, torch.Tensor) for name, value in arguments.items() if name not in given):
        return None
    try:
        unit = find_layout(given).units["pixel_values"]
    except UnknownParts:
        return None
    patches = given["image_grid_thw"].prod(-1).tolist() if unit == "patch" else 1
    parts = {name: value.split(patches if name == "pixel_values" else 1) for name, value in given.items()}
    return [dict(zip(parts, image, strict=True)) for image in zip(*parts.values(), strict=True)]


def _split_outputs(outputs: Any) -> tuple[Form, list[Features]]:
    """Return copies of the features of each image; views would keep the tensor of all images in memory."""
    pooled: Any = outputs.pooler_output
    levels = list(getattr(outputs, "deepstack_features", None) or ())
    behind = any(isinstance(level, torch.Tensor) for level in levels)  # before transformers 5.20
    if behind:
        levels = [level.split([len(one) for one in pooled]) for level in levels]
    features = [[part.clone() for part in image] for image in zip(pooled, *levels, strict=True)]
    return (type(outputs), isinstance(pooled, torch.Tensor), behind), features


def _join_features(features: Sequence[Features], kind: type, stacks: bool, behind: bool) -> Any:
    """Return outputs of `get_image_features` with these features alone.

    Args:
        features: of each image.
        kind: class of the outputs.
        stacks: whether pooled features are one tensor.
        behind: whether deepstack features are one tensor per layer.
    """
    pooled, *levels = zip(*features, strict=True)
    outputs = kind()
    outputs.pooler_output = torch.stack(pooled) if stacks else pooled
    if levels:
        outputs.deepstack_features = [torch.cat(level) if behind else level for level in levels]
    return outputs


# Outputs of transformers' processors beside pixel inputs: one entry per image, or per row of images.
_LISTED = {"num_patches", "num_crops", "num_soft_tokens_per_image", "rows", "cols"}


@contextmanager
def images_processed_once(processor: Any) -> Iterator[None]:
    """Memoise image preprocessing in this block: equal rows of images are processed once.

    Outputs are unchanged, but always tensors. Only lists of Pillow images are memoised, and only by processors of
    transformers.

    Args:
        processor: of prompts; it may have no image processor.
    """
    images: Any = getattr(processor, "image_processor", None)
    is_known = type(images).__module__.startswith("transformers.models.")  # whose processors are deterministic
    cache = PreprocessCache(images, images.preprocess) if is_known else None
    with nullcontext() if cache is None else patched_method(images, "preprocess", cache):
        yield


@dataclass
class PreprocessCache:
    """An image processor's `preprocess` with a memory of the outputs of each row of images."""

    processor: Any
    plain: Callable[..., Any]
    _known: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        as_tensors = not args and options.get("return_tensors") in (None, "pt")
        keys = _make_keys(images) if as_tensors else None
        if keys is None:
            return self.plain(images, *args, **options)
        asked = options | {"return_tensors": "pt"}
        changed = [f"{name}={value}" for name, value in asked.items() if value != getattr(self.processor, name, None)]
        calls = [(*sorted(changed), key) for key in keys]
        if (call := tuple(calls)) not in self._known:
            self._known[call] = self._combine_outputs(images, calls, asked)
        return BatchFeature(dict(self._known[call]))

    def _combine_outputs(self, images: list[Any], calls: Sequence[Hashable], options: dict[str, Any]) -> dict[str, Any]:
        """Combine the outputs of the rows, or process all rows at once if the outputs have an unknown layout."""
        for call, row in zip(calls, images, strict=True):
            if row and call not in self._known:
                self._known[call] = dict(self.plain([row], **options))
        rows = [self._known[call] if row else {} for call, row in zip(calls, images, strict=True)]
        first = next(filter(None, rows))
        one_per_row = "pixel_attention_mask" in first and not all(rows)  # which rows without images have too
        if one_per_row or first.keys() - {*IMAGE_INPUTS, *_LISTED}:
            return dict(self.plain(images, **options))
        joined: dict[str, Any] = stack_images([image_inputs_of(row) for row in rows], one_per_row=False)
        for name in first.keys() - joined.keys():
            values = [row[name] for row in rows if row]
            tensors = isinstance(values[0], torch.Tensor)
            joined[name] = torch.cat(values) if tensors else list(chain.from_iterable(values))
        return joined


def _make_keys(images: Any) -> list[Hashable] | None:
    """Return a hashable key for each row of images; None unless all rows are lists of images without palettes."""
    if not isinstance(images, list) or not all(isinstance(row, list) for row in images):
        return None
    flat = {id(image): image for row in images for image in row}
    if not flat or not all(isinstance(image, Image.Image) and image.palette is None for image in flat.values()):
        return None
    known: dict[int, Hashable] = {}
    for number, image in flat.items():
        transparency = str(image.info.get("transparency"))
        known[number] = image.mode, image.size, transparency, xxhash.xxh3_128_digest(image.tobytes())
    return [tuple(known[id(image)] for image in row) for row in images]
