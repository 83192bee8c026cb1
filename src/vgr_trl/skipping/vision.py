"""Image features of a model computed once per rollout, for generation, scoring and training."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers.utils import logging

from vgr_trl.replacing import replaced_method
from vgr_trl.sharing.backbone import base_of, causal_model, is_tracing
from vgr_trl.skipping.vision_features import Form, ImageFeatures, split
from vgr_trl.skipping.vision_images import Fingerprints, ImageCall, read_call
from vgr_trl.skipping.vision_plan import VisionPlan
from vgr_trl.skipping.vision_store import FeatureStore
from vgr_trl.skipping.vision_tower import Towers, tower_trains

logger = logging.get_logger(__name__)


@dataclass
class VisionCounts:
    """Images that passes asked for, and those whose features were computed."""

    wanted: int = 0
    computed: int = 0


class VisionOnce:
    """Computes the features of each image of a rollout once, where a plan says so."""

    def __init__(self, plan: VisionPlan) -> None:
        self.plan = plan
        self._store = FeatureStore(plan.megabytes * 2**20)
        self._fingerprints, self._towers = Fingerprints(), Towers()
        self._counts = VisionCounts()
        self._rollouts = 0  # begun within one another
        self._forms: dict[str, Form | None] = {}  # type of model -> how it returns features, None if unknown

    @contextmanager
    def rollout(self, trains: bool) -> Iterator[None]:
        """Around generation and scoring of a rollout; one within another is a further round of it.

        Args:
            trains: whether training passes over its rows follow.
        """
        if self._rollouts == 0:
            self._store.drop_unwanted() if self.plan.lasts else self._store.clear()
        self._rollouts += 1
        try:
            yield
        finally:
            self._rollouts -= 1
            if self._rollouts == 0 and (self.plan.trains or not trains):
                self._store.clear()

    @contextmanager
    def around(self, model: Any) -> Iterator[None]:
        """Compute features of images once in passes of this block; `model` may be wrapped."""
        base: Any = None if self.plan.reason_off is not None else base_of(causal_model(model))
        if not hasattr(base, "get_image_features"):
            yield
            return
        plain = base.get_image_features
        names = list(signature(plain).parameters)

        def features(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            outputs = self._outputs(base, plain, arguments)
            return plain(**arguments) if outputs is None else outputs

        with replaced_method(base, "get_image_features", features):
            yield

    def metrics(self) -> dict[str, float]:
        """Return what was computed since the last call."""
        counts, self._counts = self._counts, VisionCounts()
        return {"vision/computed_per_image": counts.computed / counts.wanted} if counts.wanted else {}

    def _outputs(self, base: Any, plain: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """What `get_image_features` returns; None if it has to be asked."""
        kind = base.config.model_type
        if is_tracing() or torch.is_inference_mode_enabled() or self._forms.get(kind, ...) is None:
            return None
        if tower_trains(base) and (torch.is_grad_enabled() or not self._rollouts):
            return None
        call = read_call(arguments, base.config)
        if call is None:
            return None
        keys = self._keys(base, call)
        found = {key: self._store.get(key) for key in keys}
        missing = {key: place for place, key in enumerate(keys) if found[key] is None}
        if missing and not self._compute(kind, plain, call, missing, found):
            return None
        self._counts.wanted += len(keys)
        self._counts.computed += len(missing)
        form = self._forms[kind]
        assert form is not None
        return form.join([found[key] for key in keys])  # type: ignore[misc]  # all are there now

    def _keys(self, base: Any, call: ImageCall) -> list[Hashable]:
        """What the features of each image depend on."""
        device = call.images[0]["pixel_values"].device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        common = self._towers.number(base), precision, repr(sorted(call.options.items()))
        names = call.images[0]
        columns = [self._fingerprints.of([image[name] for image in call.images]) for name in names]
        return [(*common, *image) for image in zip(*columns, strict=True)]

    def _compute(
        self,
        kind: str,
        plain: Callable[..., Any],
        call: ImageCall,
        missing: Mapping[Hashable, int],
        found: dict[Hashable, ImageFeatures | None],
    ) -> bool:
        """Fill in the features of missing images; without gradients, although their pass may have some."""
        with torch.no_grad():
            outputs = plain(**call.inputs_of(list(missing.values())), **call.options, return_dict=True)
        known = split(outputs, len(missing))
        self._forms[kind] = None if known is None else known[0]
        if known is None:
            logger.warning_once(
                f"Image features of {kind} are computed in every pass after all: this version of transformers returns "
                "them in a form that cannot be told apart by image."
            )
            return False
        for key, features in zip(missing, known[1], strict=True):
            found[key] = features
            self._store.put(key, features)
        return True
