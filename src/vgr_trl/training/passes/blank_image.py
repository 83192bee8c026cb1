"""A blank image through the vision tower of a process that has none where another has some.

Engines expect all processes to use the same parameters: under ZeRO-3 and FSDP2 their parts are gathered by all, under
ZeRO-2 and DDP with checkpointing the gradients are. A process that left the tower out would wait for the others, or mix
its gradients up with theirs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from PIL import Image
from torch import nn

from vgr_trl.errors import DataError
from vgr_trl.replacing import replaced
from vgr_trl.sharing.backbone import base_of, causal_model
from vgr_trl.sharing.image_inputs import has_images
from vgr_trl.skipping.vision_tower import tower_trains

SIZE = (56, 56)  # pixels; processors enlarge it to what they take


class BlankImage:
    """Lets every process call the vision tower of a pass if one of them does.

    Its features are added to the embeddings of the pass, times 0: where those of images are inserted, so that parts of
    parameters and gradients come in the same order.

    Args:
        sharded: whether passes without gradients need the tower, too.
    """

    def __init__(self, processor: Any, accelerator: Accelerator, sharded: bool) -> None:
        self._accelerator, self._sharded = accelerator, sharded
        made = processor(images=[Image.new("RGB", SIZE, (127, 127, 127))], return_tensors="pt")
        self._inputs = dict(made)

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
                with nothing_added(base, self._features):
                    return plain(*args, **kwargs)
            return plain(*args, **kwargs)

        with replaced(owner, name, taking_part):
            yield

    def _refuse_uneven(self, inputs: Mapping[str, Any]) -> None:
        if self._sharded and 0 < self._with_images(has_images(inputs)) < self._accelerator.num_processes:
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
        return self._with_images(mine) > 0 and not mine

    def _with_images(self, mine: bool) -> int:
        """How many processes have images."""
        return int(self._accelerator.gather(torch.tensor([mine], device=self._accelerator.device)).sum())

    def _features(self, base: Any) -> Any:
        names = signature(base.get_image_features).parameters
        inputs = {name: value.to(self._accelerator.device) for name, value in self._inputs.items() if name in names}
        return base.get_image_features(**inputs)


@contextmanager
def nothing_added(base: Any, features: Callable[[Any], Any]) -> Iterator[None]:
    """Add 0 times what `features` returns to the first embeddings of this block.

    Args:
        features: called with `base`, behind its embeddings.
    """

    def add(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        hook.remove()
        found = sum((tensor.float() * 0).sum() for tensor in _tensors(features(base)))
        return embedded + torch.as_tensor(found, device=embedded.device).to(embedded.dtype)

    hook = base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _tensors(value)
