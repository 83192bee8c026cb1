"""Run vision towers less: images processed once, features kept, windows attended in one call, a dummy image.

TRL has its processor make pixel inputs of every completion, and twice. transformers' towers of the Qwen-VL kind call
`sdpa` for each window of 64 patches, 80 times a layer for an image of 1,280 tokens, and have the host wait for the
device three times a layer to learn their lengths.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from transformers import BatchFeature
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from vgr_trl.pixels import (
    IMAGE_INPUTS,
    UnknownParts,
    find_layout,
    fingerprint,
    image_inputs_of,
    on_device,
    stack_images,
)
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    has_active_dropout,
    keep_keys_unrepeated,
    replaced,
    sdpa_by_key_head,
)
from vgr_trl.sharing.prefix_forward import has_images
from vgr_trl.utils import DataError

# What processors of transformers return beside pixel inputs: one entry per image, or per row of images.
_LISTED = {"num_patches", "num_crops", "num_soft_tokens_per_image", "rows", "cols"}
_EXACT = "transformers.models."  # where processors are deterministic


@contextmanager
def images_processed_once(processor: Any) -> Iterator[None]:
    """Memoise image preprocessing in this block: equal rows of images are processed once.

    What it returns is what it returns otherwise, in tensors of PyTorch also where none are asked for. Rows are lists of
    images of Pillow; everything else, and processors from elsewhere than transformers, are left alone.

    Args:
        processor: of prompts; one without an image processor is left alone, too.
    """
    images: Any = getattr(processor, "image_processor", None)
    if not type(images).__module__.startswith(_EXACT):
        yield
        return
    with replaced((images, "preprocess", _ProcessedOnce(images, images.preprocess))):
        yield


@dataclass
class _ProcessedOnce:
    """An image processor's `preprocess`, which remembers what it has returned for a row of images."""

    processor: Any
    plain: Callable[..., Any]
    _known: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        as_tensors = not args and options.get("return_tensors") in (None, "pt")
        keys = _keys(images) if as_tensors else None
        if keys is None:
            return self.plain(images, *args, **options)
        asked = options | {"return_tensors": "pt"}
        changed = [f"{name}={value}" for name, value in asked.items() if value != getattr(self.processor, name, None)]
        calls = [(*sorted(changed), key) for key in keys]
        if (call := tuple(calls)) not in self._known:
            self._known[call] = self._outputs(images, calls, asked)
        return BatchFeature(dict(self._known[call]))

    def _outputs(self, images: list[Any], calls: Sequence[Hashable], options: dict[str, Any]) -> dict[str, Any]:
        """For all rows, from those of each; as they are where it is not known how they lie together."""
        for call, row in zip(calls, images, strict=True):
            if row and call not in self._known:
                self._known[call] = dict(self.plain([row], **options))
        rows = [self._known[call] if row else {} for call, row in zip(calls, images, strict=True)]
        first = next(filter(None, rows))
        one_per_row = "pixel_attention_mask" in first and not all(rows)  # for a row without images too
        if one_per_row or first.keys() - {*IMAGE_INPUTS, *_LISTED}:
            return dict(self.plain(images, **options))
        joined: dict[str, Any] = stack_images([image_inputs_of(row) for row in rows], one_per_row=False)
        for name in first.keys() - joined.keys():
            values = [row[name] for row in rows if row]
            tensors = isinstance(values[0], torch.Tensor)
            joined[name] = torch.cat(values) if tensors else list(chain.from_iterable(values))
        return joined


def _keys(images: Any) -> list[Hashable] | None:
    """Return a key for each row of images; None unless all are lists of plain images."""
    if not isinstance(images, list) or not all(isinstance(row, list) for row in images):
        return None
    flat = {id(image): image for row in images for image in row}
    if not flat or not all(isinstance(image, Image.Image) and image.palette is None for image in flat.values()):
        return None
    known = {number: _key(image) for number, image in flat.items()}
    return [tuple(known[id(image)] for image in row) for row in images]


def _key(image: Image.Image) -> Hashable:
    transparency = str(image.info.get("transparency"))
    return image.mode, image.size, transparency, xxhash.xxh3_128_digest(image.tobytes())


def parts_of_tower(base: Any) -> list[nn.Module]:
    """The modules of a base model beside its decoder: vision tower and merger."""
    decoder = getattr(base, "language_model", None)
    return [] if decoder is None else [module for module in base.children() if module is not decoder]


def parameters_of_tower(base: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of the modules, and those of the base model itself (the newline of LLaVA-NeXT)."""
    own = base.parameters(recurse=False)
    return chain(own, chain.from_iterable(part.parameters() for part in parts_of_tower(base)))


def tower_trains(base: Any) -> bool:
    """Whether a parameter of tower or merger gets a gradient, adapters included."""
    return any(parameter.requires_grad for parameter in parameters_of_tower(base))


# Families whose image features have been seen to be all that their decoders read of images (transformers 5.23, tested).
FAMILIES = frozenset({
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma3", "llava", "llava_next",
    "internvl", "mistral3", "paligemma",
})  # fmt: skip

PixelInputs = dict[str, torch.Tensor]  # pixel inputs of an image (a tile, where images are cut into tiles) by name
Form = tuple[type, bool, bool]  # class of outputs, whether pooled ones are one tensor, whether deepstack ones are
Features = list[torch.Tensor]  # of an image, (tokens, D) each: of its placeholder tokens, and of each deepstack layer


class VisionCache:
    """Keeps the image features of a policy during a rollout; printed as the line that says so.

    A separate reference model computes its own: its weights need not be the policy's, and it scores a rollout once.

    Args:
        base: of the policy, below its head.
        megabytes: of features; those that find no room are computed in every pass.
        reason: why all are computed in every pass; None: they are not.
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
        """Drop all features, when a rollout begins."""
        self._kept.clear()
        self._bytes = 0

    @contextmanager
    def around(self, model: Any, *, counts: bool = True) -> Iterator[None]:
        """Compute features of images once in passes of this block; `model` may be wrapped.

        Args:
            counts: whether `metrics` counts these passes.
        """
        if self.reason is not None or base_of(causal_model(model)) is not self.base or tower_trains(self.base):
            yield
            return
        plain, before = self.base.get_image_features, (self._wanted, self._computed)
        names = list(signature(plain).parameters)

        def features(*args: Any, **kwargs: Any) -> Any:
            return self._outputs(plain, dict(zip(names, args, strict=False)) | kwargs)

        with replaced((self.base, "get_image_features", features)):
            yield
        if not counts:
            self._wanted, self._computed = before

    def metrics(self) -> dict[str, float]:
        """Return what was computed since the last call."""
        found = {"vision/computed_per_image": self._computed / self._wanted} if self._wanted else {}
        self._wanted = self._computed = 0
        return found

    def _outputs(self, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Return the part of the output of `get_image_features` that decoders read."""
        images = _images_of(arguments)
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
            self._form, computed = _split(outputs)
            for key, features in zip(missing, computed, strict=True):
                found[key] = features
                self._keep(key, features)
        return _join([found[key] for key in keys], *self._form)

    def _keep(self, key: Hashable, features: Features) -> None:
        size = sum(part.nbytes for part in features)
        if self._bytes + size <= self.megabytes * 2**20:
            self._kept[key] = features
            self._bytes += size


def why_not_once(base: Any) -> str | None:
    """Why the image features of a base model cannot be computed once per rollout; None if they can."""
    if base.config.model_type not in FAMILIES or not hasattr(base, "get_image_features") or not parts_of_tower(base):
        return f"not tested with models of the type {base.config.model_type}"
    if tower_trains(base):
        return "the vision tower trains"
    modules = [module for part in parts_of_tower(base) for module in part.modules()]
    if any(isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) for module in modules):
        return "adapters in the vision tower, which the reference may leave out"
    draws = any(has_active_dropout(part, when_training=True) for part in parts_of_tower(base))
    return "dropout in the vision tower" if draws else None


def _images_of(arguments: Mapping[str, Any]) -> list[PixelInputs] | None:
    """The images that `get_image_features` is called with; None if they cannot be separated."""
    given = image_inputs_of(arguments)
    if any(isinstance(value, torch.Tensor) for name, value in arguments.items() if name not in given):
        return None
    try:
        unit = find_layout(given).units["pixel_values"]
    except UnknownParts:
        return None
    if unit == "row":  # of images, padded to the most of a row
        return None
    patches = given["image_grid_thw"].prod(-1).tolist() if unit == "patch" else 1
    parts = {name: value.split(patches if name == "pixel_values" else 1) for name, value in given.items()}
    return [dict(zip(parts, image, strict=True)) for image in zip(*parts.values(), strict=True)]


def _split(outputs: Any) -> tuple[Form, list[Features]]:
    """Copies of the features of each image: outputs may hold parts of one tensor, which would stay as a whole."""
    pooled: Any = outputs.pooler_output
    levels = list(getattr(outputs, "deepstack_features", None) or ())
    behind = any(isinstance(level, torch.Tensor) for level in levels)  # before transformers 5.20
    if behind:
        levels = [level.split([len(one) for one in pooled]) for level in levels]
    features = [[part.clone() for part in image] for image in zip(pooled, *levels, strict=True)]
    return (type(outputs), isinstance(pooled, torch.Tensor), behind), features


def _join(features: Sequence[Features], kind: type, stacks: bool, behind: bool) -> Any:
    """Outputs that hold these features and nothing else."""
    pooled, *levels = zip(*features, strict=True)
    outputs = kind()
    outputs.pooler_output = torch.stack(pooled) if stacks else pooled
    if levels:
        outputs.deepstack_features = [torch.cat(level) if behind else level for level in levels]
    return outputs


def join_windows(model: nn.Module) -> int:
    """Let the attention of vision towers, where it is `sdpa`, take all windows at once from here on.

    Returns:
        The number of attention layers that do; 0 for towers of other families.
    """
    layers: list[Any] = [module for module in model.modules() if "cu_seqlens" in signature(module.forward).parameters]
    layers = [layer for layer in layers if hasattr(layer, "qkv") and hasattr(layer, "config")]
    for layer in layers:
        if not hasattr(layer, "attend_within"):  # of another trainer with this model
            layer.register_forward_pre_hook(_give_whole, with_kwargs=True)
            layer.attend_within = None
    if layers:
        keep_keys_unrepeated()
    return len(layers)


@dataclass(frozen=True)
class Windows:
    """Where the windows of all patches lie.

    Attributes:
        patches: S, of all windows.
        by_length: length -> (number of windows * length,) the patches of its windows.
        back: (S,) where each patch stands behind the windows of all lengths; None: all are of one length, in order.
    """

    patches: int
    by_length: dict[int, torch.Tensor]
    back: torch.Tensor | None


def plan_windows(lengths: list[int], device: torch.device) -> Windows:
    """Return where windows of these lengths lie, one behind the other."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        places[length] += range(end - length, end)
    by_length = {length: on_device(patches, device) for length, patches in places.items()}
    back = torch.cat([*by_length.values()]).argsort() if len(places) > 1 else None
    return Windows(sum(lengths), by_length, back)


def _give_whole(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Replace the bounds of the windows by those of all patches, and leave the windows for the attention function."""
    layer.attend_within = None
    bounds: Any = kwargs.get("cu_seqlens")
    ours = AttentionInterface._global_mapping.get("sdpa") is sdpa_by_key_head
    if bounds is None or len(bounds) < 3 or not ours or layer.config._attn_implementation != "sdpa":
        return None
    if not hasattr(bounds, "windows"):  # one tensor for all layers of a pass
        bounds.windows = plan_windows(bounds.diff().tolist(), bounds.device)
    layer.attend_within = partial(attend_windows, bounds.windows)
    return args, kwargs | {"cu_seqlens": torch.tensor([0, bounds.windows.patches], dtype=bounds.dtype)}


def attend_windows(
    windows: Windows,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Return attention within windows, (1, S, H, D), in one call for all windows of a length.

    Args:
        query, key, value: (1, H, S, D).
    """
    outputs = []
    for length, patches in windows.by_length.items():
        chosen = (each[0] if windows.back is None else each[0].index_select(1, patches) for each in (query, key, value))
        queries, keys, values = (each.unflatten(1, (-1, length)).transpose(0, 1) for each in chosen)  # (windows, H, …)
        output, _ = sdpa_attention_forward(module, queries, keys, values, None, dropout, scaling, is_causal=False)
        outputs.append(output.flatten(0, 1))  # (patches, H, D)
    found = outputs[0] if windows.back is None else torch.cat(outputs).index_select(0, windows.back)
    return found.unsqueeze(0)


class DummyImage:
    """Runs the vision tower on a dummy image in processes without images, if another process has some.

    Engines expect all processes to use the same parameters: under ZeRO-3 and FSDP2 their parts are gathered by all,
    under ZeRO-2 and DDP with checkpointing the gradients are. A process that left the tower out would wait for the
    others, or mix its gradients up with theirs. The features of the dummy image are added to the embeddings of the
    pass, times 0: where those of images are inserted, so that parts of parameters and gradients come in the same order.
    With gradients of 0 an optimizer moves a tower that trains as it would for images without a loss.

    Args:
        sharded: whether passes without gradients need the tower, too.

    Attributes:
        stands_in: whether the latest training pass of this process leaves its images out.
    """

    stands_in = False

    def __init__(self, processor: Any, accelerator: Accelerator, sharded: bool) -> None:
        self._accelerator, self._sharded = accelerator, sharded
        gray = Image.new("RGB", (56, 56), (127, 127, 127))  # which processors enlarge to what they take
        self._inputs = dict(processor(images=[gray], return_tensors="pt"))

    @contextmanager
    def around(self, model: nn.Module, generates: bool) -> Iterator[None]:
        """Take part in the passes of this block.

        Args:
            generates: whether the passes are those of `generate`, in which that cannot be had.

        Raises:
            DataError: parameters are sharded, and only some processes generate for images; it is raised in all.
        """
        causal = causal_model(model)
        base = base_of(causal)
        owner, name = (causal, "generate") if generates else (base, "forward")
        plain = getattr(owner, name)

        def taking_part(*args: Any, **kwargs: Any) -> Any:
            if generates:
                self._refuse_uneven(kwargs)
            elif self._is_due(base, kwargs):
                with add_zero_features(base, self._features):
                    return plain(*args, **kwargs)
            return plain(*args, **kwargs)

        with replaced((owner, name, taking_part)):
            yield

    def _refuse_uneven(self, inputs: Mapping[str, Any]) -> None:
        if self._sharded and 0 < self._count_with_images(has_images(inputs)) < self._accelerator.num_processes:
            raise DataError(
                "The model generates for images in some processes and for text alone in others, and its parameters "
                "are sharded: give every row an image, or none, or use vLLM, ZeRO-2 or DDP."
            )

    def _is_due(self, base: Any, inputs: Mapping[str, Any]) -> bool:
        """Whether the tower is to run though the pass has no images."""
        mine = has_images(inputs)
        learns = torch.is_grad_enabled() and tower_trains(base)
        if learns and self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            return not mine  # ZeRO-3 adds to what an earlier step has left where the first micro-batch has no gradient
        if not (learns or self._sharded):
            return False
        return self._count_with_images(mine or self.stands_in) > 0 and not mine

    def _count_with_images(self, mine: bool) -> int:
        """How many processes have images."""
        if self._accelerator.num_processes == 1:
            return mine
        return int(self._accelerator.gather(torch.tensor([mine], device=self._accelerator.device)).sum())

    def _features(self, base: Any) -> Any:
        names = signature(base.get_image_features).parameters
        inputs = {name: value.to(self._accelerator.device) for name, value in self._inputs.items() if name in names}
        return base.get_image_features(**inputs)


@contextmanager
def add_zero_features(base: Any, features: Callable[[Any], Any]) -> Iterator[None]:
    """Add 0 times what `features` returns, called with `base`, to the first embeddings of this block."""

    def add(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        hook.remove()
        outputs = features(base)
        if (pooled := getattr(outputs, "pooler_output", None)) is not None:  # all that decoders read, but for deepstack
            outputs = pooled, getattr(outputs, "deepstack_features", None)
        found = [value for value in tree_leaves(outputs) if torch.is_tensor(value) and value.is_floating_point()]
        nothing = sum((tensor.float() * 0).sum() for tensor in found)
        return embedded + torch.as_tensor(nothing, device=embedded.device).to(embedded.dtype)

    hook = base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
