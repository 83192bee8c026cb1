"""Run the vision tower on a dummy image in processes without images."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from vgr_trl.errors import DataError
from vgr_trl.patching import patched_method
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.sharing.shared_forward import has_images
from vgr_trl.vision.feature_cache import tower_trains


class DummyImage:
    """Runs the vision tower on a dummy image in processes without images, if another process has images.

    Engines expect all processes to use the same parameters: ZeRO-3 and FSDP2 gather shards in all processes, ZeRO-2 and
    DDP with checkpointing reduce gradients. A process without the tower would wait for the others, or mix up gradients.
    The features of the dummy image, times 0, are added to the embeddings, where features of images are inserted, so
    that shards and gradients come in the same order. With gradients of 0 an optimizer treats a trained tower as it
    would for images without a loss.

    Args:
        processor: of prompts.
        accelerator: of the trainer.
        sharded: whether parameters are sharded, so that passes without gradients need the tower, too.

    Attributes:
        stands_in: whether the latest training pass of this process drops its images.
    """

    stands_in = False

    def __init__(self, processor: Any, accelerator: Accelerator, sharded: bool) -> None:
        self._accelerator, self._sharded = accelerator, sharded
        gray = Image.new("RGB", (56, 56), (127, 127, 127))  # which processors resize
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
            found = "Only some processes generate for images, and the parameters are sharded"
            raise DataError(f"{found}: give every row an image, or none, or use vLLM, ZeRO-2 or DDP.")

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
        found = [value for value in tree_leaves(outputs) if torch.is_tensor(value) and value.is_floating_point()]
        nothing = sum((tensor.float() * 0).sum() for tensor in found)
        return embedded + torch.as_tensor(nothing, device=embedded.device).to(embedded.dtype)

    with base.get_input_embeddings().register_forward_hook(add) as hook:
        yield
