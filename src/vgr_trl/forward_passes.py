"""Wrap the forward passes of a run: cached image features, narrow head, shared prompts, dummy image."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from vgr_trl.efficiency.loss_mask import score_only_tokens
from vgr_trl.efficiency.vision_cache import VisionCache, tower_trains
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled
from vgr_trl.sharing.prefix_forward import has_images
from vgr_trl.sharing.sharing import SharedPasses, whole_groups
from vgr_trl.utils import DataError, Feature, NotFiniteError, patched_attribute


class ForwardPasses:
    """Wraps the forward passes of a run, in this order: image features, the narrow head, shared prompts, a dummy image.

    Args:
        features: what is shared and skipped, by name.
        vision_cache: keeps image features.
        shared: shares prompts.
        dummy_image: lets a process without images run the vision tower; None: not needed.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        vision_cache: VisionCache,
        shared: SharedPasses,
        dummy_image: "DummyImage | None",
    ) -> None:
        self.features, self.vision_cache, self.shared, self.dummy_image = features, vision_cache, shared, dummy_image

    @contextmanager
    def around(
        self,
        model: nn.Module,
        completion_length: int | None = None,
        *,
        packs: bool = False,
        counts: bool = True,
        again: Sequence[bool] | None = None,
    ) -> Iterator[None]:
        """Wrap the passes of this block.

        Args:
            completion_length: T of a scored batch; None where the model generates.
            packs: whether completions pass without padding between them.
            counts: whether metrics count these passes; those of an evaluation are left out.
            again: (N,) whether a later micro-batch of the optimizer step reads the prompt of a row; None: no prompt is
                lent to several micro-batches.
        """
        generates, trains = completion_length is None, torch.is_grad_enabled()
        stage = "generation" if generates else "training" if trains else "scoring"
        with (
            self.vision_cache.around(model, counts=counts),
            nullcontext() if generates or trains else score_labelled_tokens(model),
            self.shared.around(
                self.features[f"share_{stage}"], model, completion_length, packs=packs, counts=counts, again=again
            ),
            nullcontext() if self.dummy_image is None else self.dummy_image.around(model, generates),
        ):
            yield


def score_labelled_tokens(model: nn.Module) -> AbstractContextManager[None]:
    """Skip padding in TRL's fused head, which scores it where there is no Triton."""
    causal = causal_model(model)
    base = base_of(causal)
    return nullcontext() if base is causal or is_compiled(model) else score_only_tokens(causal, base, None)


def rows_per_pass(
    batch_size: int,
    group: int | None,
    *,
    most_tokens: int | None,
    columns: tuple[int, int],
    gather: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> int:
    """Return how many rows pass at a time in scoring, the same on every process.

    Args:
        batch_size: as TRL asks for.
        group: G where prompts are shared, so that whole groups pass; None: they are not.
        most_tokens: `max_tokens_per_micro_batch`.
        columns: P + T and T of this process.
    """
    size = group or 1
    batch_size = whole_groups(batch_size, size)
    if most_tokens is None:
        return batch_size
    every = gather(torch.tensor(columns, device=device)).view(-1, 2).amax(0)
    longest, completion = map(int, every.tolist())
    if group is None:
        return min(batch_size, max(most_tokens // longest, 1))
    if (groups := most_tokens // (longest + (size - 1) * completion)) > 0:
        return min(batch_size, groups * size)
    return min(batch_size, max((most_tokens - longest) // completion + 1, 1))


def refuse_nan(logps: torch.Tensor, mask: torch.Tensor, step: int) -> None:
    """Raise `NotFiniteError` if log-probabilities are NaN; signals would take them for those of rows without images."""
    if count := int((logps.isnan() & mask).any(dim=1).sum()):
        raise NotFiniteError(
            f"The model's log-probabilities of {count} of {len(mask)} completions are NaN at step {step + 1}: its "
            "weights are broken, or what it computes overflows, so look at the newest checkpoint, or use bfloat16 "
            "instead of float16."
        )


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

        @wraps(plain)
        def taking_part(*args: Any, **kwargs: Any) -> Any:
            if generates:
                self._refuse_uneven(kwargs)
            elif self._is_due(base, kwargs):
                with add_zero_features(base, self._features):
                    return plain(*args, **kwargs)
            return plain(*args, **kwargs)

        with patched_attribute(owner, name, taking_part):
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
