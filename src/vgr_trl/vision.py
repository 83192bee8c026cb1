"""Vision towers: features kept during a rollout, equal images processed once, windows joined, dummy images."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import accumulate, chain
from typing import Any

import torch
import xxhash
from accelerate import Accelerator, DistributedType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import BatchFeature
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from vgr_trl.errors import DataError
from vgr_trl.patching import patched_method
from vgr_trl.pixels import (
    IMAGE_INPUTS,
    Images,
    RowImages,
    UnknownParts,
    fingerprint,
    has_images,
    image_inputs_of,
    on_device,
)
from vgr_trl.sharing.attention import keep_keys_unrepeated, sdpa_by_key_head
from vgr_trl.sharing.model_support import base_of, causal_model, has_active_dropout


def parts_of_tower(base: Any) -> list[nn.Module]:
    """Return the modules of a base model beside its decoder: vision tower and merger."""
    decoder = getattr(base, "language_model", None)
    return [] if decoder is None else [module for module in base.children() if module is not decoder]


def parameters_of_tower(base: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of tower, merger and the base model itself (such as LLaVA-NeXT's newline)."""
    direct = base.parameters(recurse=False)
    return chain(direct, chain.from_iterable(part.parameters() for part in parts_of_tower(base)))


def tower_trains(base: Any) -> bool:
    """Whether a parameter of tower or merger is trained, adapters included."""
    return any(parameter.requires_grad for parameter in parameters_of_tower(base))


# Families whose decoders read nothing of images but their features (tested with transformers 5.23).
FAMILIES = frozenset({
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma3", "llava", "llava_next",
    "internvl", "mistral3", "paligemma",
})  # fmt: skip

Form = tuple[type, bool, bool]  # class of outputs; whether pooled and deepstack features are one tensor each
Features = list[torch.Tensor]  # features of an image: pooled, then of each deepstack layer, (tokens, D) each


class VisionCache:
    """Keeps the image features of a policy during a rollout; `str` tells whether and why not.

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
        metrics = {"vision/computed_per_image": self._computed / self._wanted} if self._wanted else {}
        self._wanted = self._computed = 0
        return metrics

    def _complete_outputs(self, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Keep the outputs of `get_image_features` that decoders read."""
        images = _separate_images(arguments)
        if images is None:
            return plain(**arguments)
        keys = [tuple((name, fingerprint(value)) for name, value in image.items()) for image in images]
        missing = {key: image for key, image in zip(keys, images, strict=True) if key not in self._kept}
        self._wanted, self._computed = self._wanted + len(keys), self._computed + len(missing)
        by_key = {key: self._kept[key] for key in keys if key in self._kept}
        if missing:
            inputs = {name: torch.cat([image[name] for image in missing.values()]) for name in images[0]}
            with torch.no_grad():  # transformers may have marked the patches of a frozen tower
                outputs = plain(**{**arguments, **inputs})
            self._form, computed = _split_outputs(outputs)
            for key, features in zip(missing, computed, strict=True):
                by_key[key] = features
                self._keep(key, features)
        return _join_features([by_key[key] for key in keys], *self._form)

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
    """Split the inputs of `get_image_features` by image or tile; return None if they cannot be separated."""
    inputs = image_inputs_of(arguments)
    if not inputs or any(isinstance(arguments[name], torch.Tensor) for name in arguments.keys() - inputs.keys()):
        return None
    count = len(inputs.get("image_grid_thw", inputs.get("pixel_values", ())))
    try:
        return RowImages(inputs, [1] * count, [1] * count).rows
    except UnknownParts:
        return None


def _split_outputs(outputs: Any) -> tuple[Form, list[Features]]:
    """Copy the features of each image, because views would keep the tensor of all images in memory."""
    pooled: Any = outputs.pooler_output
    levels = list(getattr(outputs, "deepstack_features", None) or ())
    behind = any(isinstance(level, torch.Tensor) for level in levels)  # before transformers 5.20
    if behind:
        levels = [level.split([len(image) for image in pooled]) for level in levels]
    features = [[part.clone() for part in image] for image in zip(pooled, *levels, strict=True)]
    return (type(outputs), isinstance(pooled, torch.Tensor), behind), features


def _join_features(features: Sequence[Features], kind: type, stacks: bool, behind: bool) -> Any:
    """Return outputs of `get_image_features` with these features alone.

    Args:
        features: features of each image.
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
        processor: processor of prompts; it may have no image processor.
    """
    images: Any = getattr(processor, "image_processor", None)
    is_known = type(images).__module__.startswith("transformers.models.")  # its processors are deterministic
    cache = PreprocessCache(images, images.preprocess) if is_known else None
    with nullcontext() if cache is None else patched_method(images, "preprocess", cache):
        yield


@dataclass
class PreprocessCache:
    """Memoises an image processor's `preprocess` by row of images."""

    processor: Any
    plain: Callable[..., Any]
    _outputs: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        as_tensors = not args and options.get("return_tensors") in (None, "pt")
        keys = _make_keys(images) if as_tensors else None
        if keys is None:
            return self.plain(images, *args, **options)
        asked = options | {"return_tensors": "pt"}
        changed = [f"{name}={value}" for name, value in asked.items() if value != getattr(self.processor, name, None)]
        calls = [(*sorted(changed), key) for key in keys]
        if (call := tuple(calls)) not in self._outputs:
            self._outputs[call] = self._combine_outputs(images, calls, asked)
        return BatchFeature(dict(self._outputs[call]))

    def _combine_outputs(self, images: list[Any], calls: Sequence[Hashable], options: dict[str, Any]) -> dict[str, Any]:
        """Combine the outputs of the rows, or process all rows at once if the outputs have an unknown layout."""
        for call, row in zip(calls, images, strict=True):
            if row and call not in self._outputs:
                self._outputs[call] = dict(self.plain([row], **options))
        rows = [self._outputs[call] if row else {} for call, row in zip(calls, images, strict=True)]
        first = next(filter(None, rows))
        one_per_row = "pixel_attention_mask" in first and not all(rows)  # rows without images have a mask, too
        if one_per_row or first.keys() - {*IMAGE_INPUTS, *_LISTED}:
            return dict(self.plain(images, **options))
        joined: dict[str, Any] = RowImages(None, parts=[image_inputs_of(row) for row in rows]).tensors
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
    keys: dict[int, Hashable] = {}
    for number, image in flat.items():
        transparency = str(image.info.get("transparency"))
        keys[number] = image.mode, image.size, transparency, xxhash.xxh3_128_digest(image.tobytes())
    return [tuple(keys[id(image)] for image in row) for row in images]


def join_windows(model: nn.Module) -> int:
    """Attend within all windows of vision towers in a single call from here on, where their attention is `sdpa`.

    Returns:
        The number of changed attention layers; 0 for towers of other families.
    """
    layers: list[Any] = [module for module in model.modules() if "cu_seqlens" in signature(module.forward).parameters]
    layers = [layer for layer in layers if hasattr(layer, "qkv") and hasattr(layer, "config")]
    for layer in layers:
        if _merge_bounds not in layer._forward_pre_hooks.values():  # hooked by another trainer with this model
            layer.register_forward_pre_hook(_merge_bounds, with_kwargs=True)
    if layers:
        keep_keys_unrepeated()
    return len(layers)


def plan_windows(lengths: list[int], device: torch.device) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
    """Return the positions of consecutive windows among all patches.

    Args:
        lengths: number of patches of each window, S in all.
        device: device of the returned index tensors.

    Returns:
        Length of a window -> indices of the patches in windows of this length, (windows * length,).
        (S,) index of each patch in the concatenation of these; None: all windows have one length.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        places[length] += range(end - length, end)
    by_length = {length: on_device(patches, device) for length, patches in places.items()}
    return by_length, torch.cat([*by_length.values()]).argsort() if len(places) > 1 else None


_PLANS = WeakTensorKeyDictionary()  # cu_seqlens -> the arguments that take their place


def _merge_bounds(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Merge cu_seqlens into a single segment, and pass the windows on to `sdpa_by_key_head`."""
    bounds: Any = kwargs.get("cu_seqlens")
    is_ours = AttentionInterface._global_mapping.get("sdpa") is sdpa_by_key_head
    if bounds is None or len(bounds) < 3 or not is_ours or layer.config._attn_implementation != "sdpa":
        return None
    if bounds not in _PLANS:  # all layers of a pass have the same bounds
        lengths = bounds.diff().tolist()
        attend = partial(attend_windows, *plan_windows(lengths, bounds.device))
        whole = torch.tensor([0, sum(lengths)], dtype=bounds.dtype)
        _PLANS[bounds] = {"cu_seqlens": whole, "attend_within": attend}
    return args, kwargs | _PLANS[bounds]


def attend_windows(
    by_length: Mapping[int, torch.Tensor],
    back: torch.Tensor | None,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Compute attention within windows, with a call for each length of windows.

    Args:
        by_length, back: positions of the windows, from `plan_windows`.
        module: attention layer.
        query: (1, H, S, D).
        key: (1, H, S, D).
        value: (1, H, S, D).
        dropout: probability.
        scaling: softmax scale; None: 1 / sqrt(D).

    Returns:
        (1, S, H, D).
    """
    outputs = []
    for length, patches in by_length.items():
        chosen = (tensor[0] if back is None else tensor[0].index_select(1, patches) for tensor in (query, key, value))
        queries, keys, values = (part.unflatten(1, (-1, length)).transpose(0, 1) for part in chosen)  # (windows, H, …)
        output, _ = sdpa_attention_forward(module, queries, keys, values, None, dropout, scaling, is_causal=False)
        outputs.append(output.flatten(0, 1))  # (patches, H, D)
    joined = outputs[0] if back is None else torch.cat(outputs).index_select(0, back)
    return joined.unsqueeze(0)


class DummyImage:
    """Runs the vision tower on a dummy image in processes without images, if another process has images.

    Engines expect all processes to use the same parameters: ZeRO-3 and FSDP2 gather shards in all processes, ZeRO-2 and
    DDP with checkpointing reduce gradients. A process without the tower would wait for the others, or mix up gradients.
    The features of the dummy image, times 0, are added to the embeddings, where features of images are inserted, so
    that shards and gradients come in the same order. With gradients of 0 an optimizer treats a trained tower as it
    would for images without a loss.

    Args:
        processor: processor of prompts.
        accelerator: accelerator of the run.
        sharded: whether parameters are sharded, so that passes without gradients need the tower, too.

    Attributes:
        stands_in: whether the latest training pass of this process drops its images.
    """

    stands_in = False

    def __init__(self, processor: Any, accelerator: Accelerator, sharded: bool) -> None:
        self._accelerator, self._sharded = accelerator, sharded
        gray = Image.new("RGB", (56, 56), (127, 127, 127))  # processors resize it
        self._inputs = dict(processor(images=[gray], return_tensors="pt"))

    def around(self, model: nn.Module, generates: bool) -> AbstractContextManager[None]:
        """Run the tower on the dummy image where needed, in passes of this block.

        Args:
            model: transformers model, also wrapped.
            generates: whether the model generates, where no dummy image can run.

        Raises:
            DataError: parameters are sharded, and only some processes generate for images; it is raised in all, by the
                call in the block.
        """
        causal = causal_model(model)
        base = base_of(causal)
        owner, name = (causal, "generate") if generates else (base, "forward")
        plain = causal.generate if generates else base.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if generates:
                self._refuse_uneven(kwargs)
            elif self._is_due(base, kwargs):
                with add_zero_features(base, self._compute_features):
                    return plain(*args, **kwargs)
            return plain(*args, **kwargs)

        return patched_method(owner, name, run)

    def _refuse_uneven(self, inputs: Mapping[str, Any]) -> None:
        if self._sharded and 0 < self._count_with_images(has_images(inputs)) < self._accelerator.num_processes:
            problem = "Only some processes generate for images, and the parameters are sharded"
            raise DataError(f"{problem}: give every row an image, or none, or use vLLM, ZeRO-2 or DDP.")

    def _is_due(self, base: Any, inputs: Mapping[str, Any]) -> bool:
        """Whether the tower has to run although the pass has no images."""
        mine = has_images(inputs)
        learns = torch.is_grad_enabled() and tower_trains(base)
        if learns and self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            return not mine  # without a gradient in the first micro-batch, ZeRO-3 would add to an earlier step's
        if not (learns or self._sharded):
            return False
        return self._count_with_images(mine or self.stands_in) > 0 and not mine

    def _count_with_images(self, mine: bool) -> int:
        """Return how many processes have images."""
        if self._accelerator.num_processes == 1:
            return mine
        return int(self._accelerator.gather(torch.tensor([mine], device=self._accelerator.device)).sum())

    def _compute_features(self, base: Any) -> Any:
        names = signature(base.get_image_features).parameters
        inputs = {name: value.to(self._accelerator.device) for name, value in self._inputs.items() if name in names}
        return base.get_image_features(**inputs)


@contextmanager
def add_zero_features(base: Any, features: Callable[[Any], Any]) -> Iterator[None]:
    """Add image features times 0 to the first embeddings of this block.

    Args:
        base: base model (without head) of a transformers model.
        features: returns image features, given `base`.
    """

    def add(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        hook.remove()
        outputs = features(base)
        if (pooled := getattr(outputs, "pooler_output", None)) is not None:
            # Pooled and deepstack features are all that decoders read.
            outputs = pooled, getattr(outputs, "deepstack_features", None)
        tensors = [value for value in tree_leaves(outputs) if torch.is_tensor(value) and value.is_floating_point()]
        zeros = sum((tensor.float() * 0).sum() for tensor in tensors)
        return embedded + torch.as_tensor(zeros, device=embedded.device).to(embedded.dtype)

    with base.get_input_embeddings().register_forward_hook(add) as hook:
        yield
