"""Run the forward passes of a run, each for a stated purpose: `ForwardPasses.run_pass`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

from vgr_trl.errors import NotFiniteError
from vgr_trl.passes.loss_mask import Skipping, scatter_back, score_only_tokens
from vgr_trl.patches.trl import make_completions_causal
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sharing.context_manager import whole_groups
from vgr_trl.sharing.lending import READ_AGAIN, is_last_micro_batch
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled
from vgr_trl.sharing.shared_forward import has_images
from vgr_trl.signals.scoring import Purpose, Scores, Want, head_with_average_gradient, score


class ForwardPasses:
    """Runs the forward passes of a run, which share prompts and skip tokens without loss.

    Args:
        trainer: its model is the policy, whose passes in evaluation mode are not counted and not timed.
        plain: TRL's `_get_per_token_logps_and_entropies`.

    Attributes:
        skipping: decides which tokens of a micro-batch run.
    """

    def __init__(self, trainer: ConstructedTrainer, plain: Callable[..., tuple[Tensor, Any, Any]]) -> None:
        self.plain, self.policy, self.args, self.accelerator = plain, trainer.model, trainer.args, trainer.accelerator
        self.features, self.clock, self.dummy_image = trainer.features, trainer.clock, trainer.dummy_image
        self.rows, self.shared, self.vision_cache = trainer.rows_per_pass, trainer.shared_passes, trainer.vision_cache
        self.skipping = Skipping(trainer.features, bool(trainer.tools), trainer.pad_to_multiple_of)

    def run_pass(
        self, model: nn.Module, batch: Mapping[str, Any], want: Want, *, purpose: Purpose, gradients: bool
    ) -> Scores:
        """Run a model over completions, and return the wanted quantities.

        Passes without gradients run in chunks of rows, except for the loss of an evaluation. With `want.tokens`, only
        the rows and columns of these tokens run.

        Args:
            model: the policy, its reference or a critic, also wrapped.
            batch: arguments of TRL's scoring, but for the model, (N, P + T). With tools `tool_mask` (N, T); where
                prompts are lent to several micro-batches, `READ_AGAIN` (N,), whether a later one reads the prompt.
            want: quantities to return, and tokens that are read.
            purpose: of the pass.
            gradients: whether a backward pass follows.
        """
        given = {name: value for name, value in batch.items() if value is not None}
        again: Sequence[bool] | None = given.pop(READ_AGAIN, None)
        length, counts = given["logits_to_keep"], self.policy.training
        inputs = make_completions_causal(given, causal_model(model).config, length)
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with torch.set_grad_enabled(gradients):
            if want.tokens is not None:
                return self._run_on_tokens(model, inputs, want, want.tokens, again)
            rows = None if gradients or purpose is Purpose.EVALUATION else self._rows_of_chunk(inputs)
            with (
                self.clock.stage(purpose.value, counts and not gradients),
                nullcontext() if gradients else disable_gradient_checkpointing(self.policy, checkpointing),
                self.around(model, length, counts=counts),
            ):
                return score(model, inputs, want, compute=self._compute, rows_per_pass=rows)

    def _compute(
        self, model: nn.Module, inputs: dict[str, Any], want: Want
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.plain(model, **inputs, compute_entropy=want.entropies, compute_aux_loss=want.router_loss)

    def _rows_of_chunk(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of rows of a scoring chunk, the same on every process."""
        args, trains, most = self.args, self.policy.training, self.args.max_tokens_per_micro_batch
        size = args.num_generations if trains else args.num_generations_eval or args.num_generations
        group = size if self.features.share_scoring.enabled else None
        rows = whole_groups(self.rows.given if trains else args.per_device_eval_batch_size, group or 1)
        if most is None:
            return rows
        columns = torch.tensor([inputs["input_ids"].size(1), inputs["logits_to_keep"]], device=self.accelerator.device)
        longest, completion = self.accelerator.gather(columns).view(-1, 2).amax(0).tolist()
        return min(rows, rows_within(most, group, longest, completion))

    def _run_on_tokens(
        self, model: nn.Module, inputs: dict[str, Any], want: Want, tokens: Tensor, again: Sequence[bool] | None
    ) -> Scores:
        """Run the rows and columns of the tokens with loss; other tokens get 0, without a gradient."""
        reads_states = want.hidden or want.values is not None
        if not (self.skipping.runs_images(inputs) or tokens.any() or reads_states) and self._can_skip_pass():
            anchor = torch.zeros(tokens.shape, device=tokens.device, requires_grad=True)
            return Scores(0 * anchor, tokens, torch.zeros_like(anchor) if want.entropies else None, rows_run=0)
        part, window = self.skipping.trim(inputs, tokens, causal_model(model).config)
        if self.dummy_image is not None:
            self.dummy_image.stands_in = has_images(inputs) and not has_images(part)
        again = again and [again[row] and window.images for row in window.rows]
        packs, scored = self.features.pack_completions.enabled, tokens[window.rows, : window.completion]
        with self.around(model, window.completion, tokens=scored, packs=packs, again=again):
            scores = score(model, part, want, compute=self._compute)
        found = {"logps": scores.logps, "entropies": scores.entropies, "values": scores.values}
        wide: dict[str, Any] = {
            name: scatter_back(each, window, tokens) for name, each in found.items() if each is not None
        }
        return replace(scores, **wide, mask=tokens)

    def _can_skip_pass(self) -> bool:
        """Whether a micro-batch without loss can be skipped: all weights have gradients already.

        Where processes exchange gradients, or parts of weights, all have to run the model.
        """
        kind, lending = self.accelerator.distributed_type, self.shared.lending
        alone = self.accelerator.num_processes == 1 or not is_last_micro_batch()
        whole = kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        closes = lending is not None and lending.open and is_last_micro_batch()  # its pass runs open prompts backward
        if not (alone and whole and self.skipping.rows and self.skipping.padding) or closes:
            return False
        return all(weight.grad is not None for weight in self.policy.parameters() if weight.requires_grad)

    @contextmanager
    def around(
        self,
        model: nn.Module,
        completion_length: int | None = None,
        *,
        tokens: Tensor | None = None,
        packs: bool = False,
        counts: bool = True,
        again: Sequence[bool] | None = None,
    ) -> Iterator[None]:
        """Wrap the passes of this block, in this order: image features, head, shared prompts, dummy image.

        Args:
            model: the model that runs, also wrapped.
            completion_length: T of a scored batch; None where the model generates.
            tokens: (N, T) bool, tokens with loss of a training pass.
            packs: whether completions pass without padding between them.
            counts: whether metrics count these passes; those of an evaluation are left out.
            again: (N,) whether a later micro-batch of the optimizer step reads the prompt of a row; None: no prompt is
                lent to several micro-batches.
        """
        generates, trains = completion_length is None, torch.is_grad_enabled()
        stage = "generation" if generates else "training" if trains else "scoring"
        causal = causal_model(model)
        base = base_of(causal)
        # Without Triton, TRL scores padding, too.
        narrows = not (trains or generates or base is causal or is_compiled(model))
        narrows = narrows if tokens is None else self.features.skip_head.enabled
        sharing = self.features.sharing[stage].reason
        with (
            self.vision_cache.around(model, counts=counts),
            head_with_average_gradient(causal) if self.accelerator.is_fsdp2 and trains else nullcontext(),
            score_only_tokens(causal, base, tokens) if narrows else nullcontext(),
            self.shared.around(sharing, model, completion_length, packs=packs, counts=counts, again=again),
            nullcontext() if self.dummy_image is None else self.dummy_image.around(model, generates),
        ):
            yield


def rows_within(most_tokens: int, group: int | None, longest: int, completion: int) -> int:
    """Return the number of rows that fit into a budget of tokens, at least one.

    Args:
        most_tokens: `max_tokens_per_micro_batch`.
        group: G where prompts are shared, so that whole groups pass if one fits; None: they are not.
        longest: P + T.
        completion: T.
    """
    if group is None:
        return max(most_tokens // longest, 1)
    if (groups := most_tokens // (longest + (group - 1) * completion)) > 0:
        return groups * group
    return max((most_tokens - longest) // completion + 1, 1)


def refuse_nan(logps: Tensor, mask: Tensor, step: int) -> None:
    """Raise `NotFiniteError` if log-probabilities (N, T) are NaN, which signals would read as rows without images.

    Args:
        logps: of a scoring pass.
        mask: (N, T) bool, tokens that count.
        step: optimizer steps so far.
    """
    if count := int((logps.isnan() & mask).any(dim=1).sum()):
        raise NotFiniteError(
            f"The model's log-probabilities of {count} of {len(mask)} completions are NaN at step {step + 1}: its "
            "weights are broken, or what it computes overflows, so look at the newest checkpoint, or use bfloat16 "
            "instead of float16."
        )
