"""Run the vision tower on a dummy image in processes without images."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from vgr_trl.errors import DataError
from vgr_trl.patching import patched_method
from vgr_trl.sharing.empty_images import has_images
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.vision.feature_cache import tower_trains


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

        with patched_method(owner, name, taking_part):
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
