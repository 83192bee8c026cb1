"""Wrap the forward passes of a run: cached image features, narrow head, shared prompts, dummy image."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from vgr_trl.errors import NotFiniteError
from vgr_trl.passes.loss_mask import score_only_tokens
from vgr_trl.run_facts import Features
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled
from vgr_trl.sharing.shared_passes import SharedPasses, whole_groups
from vgr_trl.vision.dummy_image import DummyImage
from vgr_trl.vision.feature_cache import VisionCache


@dataclass
class ForwardPasses:
    """Wraps the forward passes of a run, in this order: image features, the narrow head, shared prompts, a dummy image.

    Attributes:
        features: what passes share and skip.
        vision_cache: keeps image features.
        shared: shares prompts.
        dummy_image: lets a process without images run the vision tower; None: not needed.
    """

    features: Features
    vision_cache: VisionCache
    shared: SharedPasses
    dummy_image: DummyImage | None

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
        causal = causal_model(model)
        base = base_of(causal)
        headless = base is causal or is_compiled(model)  # else scoring skips padding, which TRL scores without Triton
        with (
            self.vision_cache.around(model, counts=counts),
            nullcontext() if generates or trains or headless else score_only_tokens(causal, base, None),
            self.shared.around(
                self.features.sharing[stage].reason,
                model,
                completion_length,
                packs=packs,
                counts=counts,
                again=again,
            ),
            nullcontext() if self.dummy_image is None else self.dummy_image.around(model, generates),
        ):
            yield


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
