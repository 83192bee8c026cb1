"""Run the forward passes of a run, each for a stated purpose and over one row: `ForwardPasses.run_pass`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

from vgr_trl.errors import NotFiniteError
from vgr_trl.passes.loss_mask import Skipping, find_text
from vgr_trl.patches.trl import make_completions_causal
from vgr_trl.rollout import ConstructedTrainer
from vgr_trl.sharing.context_manager import share_prompts
from vgr_trl.sharing.model_support import base_of, causal_model, replace_hidden_states
from vgr_trl.sharing.prefix_split import check_inputs, find_split, round_up_to_groups
from vgr_trl.sharing.report import SharingReport, UnsupportedModel
from vgr_trl.sharing.row import Row, lay_out
from vgr_trl.sharing.shared_forward import (
    drop_empty_images,
    has_images,
    ignore_empty_images,
    prepare_rows,
    run_row,
)
from vgr_trl.signals.scoring import (
    Computed,
    Purpose,
    Scores,
    Want,
    head_with_average_gradient,
    read_hidden_states,
    score,
)


class ForwardPasses:
    """Runs the forward passes of a run, each once over one row of prompts and completions.

    Args:
        trainer: its model is the policy, whose passes in evaluation mode are not counted and not timed.
        plain: TRL's `_get_per_token_logps_and_entropies`, for models and modes without a row.

    Attributes:
        skipping: decides which tokens of a micro-batch run.
        adapter_dtype: type in which autocast computes with adapters; None: without it, or with sharded weights.
    """

    def __init__(self, trainer: ConstructedTrainer, plain: Callable[..., tuple[Tensor, Any, Any]]) -> None:
        self.plain, self.policy, self.args, self.accelerator = plain, trainer.model, trainer.args, trainer.accelerator
        self.features, self.clock, self.dummy_image = trainer.features, trainer.clock, trainer.dummy_image
        self.rows, self.vision_cache = trainer.rows_per_pass, trainer.vision_cache
        self.agree, self.is_sharded = trainer._all_agree, trainer.is_sharded
        self.skipping = Skipping(trainer.features, bool(trainer.tools))
        precision = self.accelerator.mixed_precision if self.accelerator.distributed_type in _WHOLE else "no"
        self.adapter_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._report = SharingReport()
        if self.features.share_training.enabled or self.features.share_scoring.enabled:
            prepare_rows(base_of(causal_model(self.policy)))

    def run_pass(
        self, model: nn.Module, batch: Mapping[str, Any], want: Want, *, purpose: Purpose, gradients: bool
    ) -> Scores:
        """Run a model over completions, and return the wanted quantities.

        Passes without gradients run in chunks of rows, except for the loss of an evaluation. With `want.tokens`, only
        the rows and columns of these tokens run.

        Args:
            model: the policy, its reference or a critic, also wrapped.
            batch: arguments of TRL's scoring, but for the model, (N, P + T). With tools `tool_mask` (N, T).
            want: quantities to return, and tokens that are read.
            purpose: of the pass.
            gradients: whether a backward pass follows.
        """
        given = {name: value for name, value in batch.items() if value is not None}
        counts = self.policy.training
        inputs = make_completions_causal(given, causal_model(model).config, given["logits_to_keep"])
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        if want.tokens is not None and self._can_skip_pass(inputs, want, want.tokens):
            anchor = torch.zeros(want.tokens.shape, device=want.tokens.device, requires_grad=True)
            return Scores(0 * anchor, want.tokens, torch.zeros_like(anchor) if want.entropies else None, rows_run=0)
        is_whole = gradients or purpose is Purpose.EVALUATION or want.tokens is not None
        rows = None if is_whole else self._rows_of_chunk(inputs)
        averages = self.accelerator.is_fsdp2 and gradients
        uneven = self.agree if self.is_sharded and self.dummy_image is None else None
        has_rows = self.features.sharing["training" if gradients else "scoring"].enabled
        with (
            torch.set_grad_enabled(gradients),
            self.clock.stage(purpose.value, counts and not gradients),
            nullcontext() if gradients else disable_gradient_checkpointing(self.policy, checkpointing),
            self.vision_cache.around(model, counts=counts),
            head_with_average_gradient(causal_model(model)) if averages else nullcontext(),
            ignore_empty_images(model, agree=uneven) if uneven or not has_rows else nullcontext(),
            nullcontext() if self.dummy_image is None else self.dummy_image.around(model, False),
        ):
            scores = score(model, inputs, want, compute=self._compute, rows_per_pass=rows)
        return replace(scores, values=scores.logps) if purpose is Purpose.CRITIC else scores  # its head gives values

    def _compute(self, model: nn.Module, inputs: dict[str, Any], want: Want) -> Computed:
        """Run one call of the model: over a row, or by TRL's method where there is none."""
        laid, length = self._lay_out(model, inputs, want.tokens), inputs["logits_to_keep"]
        if laid is None:
            reading: Any = read_hidden_states(model, length) if want.reads_states else nullcontext()
            with reading as read:
                found = self.plain(model, **inputs, compute_entropy=want.entropies, compute_aux_loss=want.router_loss)
            return Computed(*found, read[0] if read else None, None, len(inputs["input_ids"]))
        row, call = laid
        scored = inputs["attention_mask"][:, -length:].bool() if want.tokens is None else want.tokens  # (N, T)
        tokens = inputs["input_ids"][:, -length:][scored].unsqueeze(0)  # (1, K)
        places = row.reads(length)[scored] if tokens.numel() else tokens[0]  # without loss the row may be another one
        states = list[Tensor]()

        def select_emitting(hidden: Tensor) -> Tensor:
            states.append(hidden)
            return hidden[:, places]

        base = base_of(causal_model(model))
        if self.dummy_image is not None:
            self.dummy_image.stands_in = has_images(inputs) and not has_images(call)
        # Labels of the next token: TRL's head projects these positions only, and keeps no logits.
        labels = {"labels": None, "shift_labels": tokens, "fused_lm_head": True}
        with replace_hidden_states(base, select_emitting), self.accelerator.autocast():
            outputs = run_row(model, base, row, call | labels)
        if self.policy.training:
            self._report.add(len(row.rows), len(row.prompts))
        logps: Any
        logps, entropies = (
            None if each is None else each.new_zeros(scored.shape).masked_scatter(scored.to(each.device), each)
            for each in (outputs.log_probs, outputs.entropy)
        )
        hidden = states[0][0, row.reads(length).clamp(min=0)] if want.reads_states else None  # (N, T, D)
        return Computed(logps, entropies if want.entropies else None, None, hidden, want.tokens, len(row.rows))

    def _lay_out(
        self, model: nn.Module, inputs: Mapping[str, Any], tokens: Tensor | None
    ) -> tuple[Row, dict[str, Any]] | None:
        """Lay out a batch as a row, or return None where the model or the mode has none.

        Args:
            inputs: arguments of TRL's scoring, but for the model.
            tokens: (N, T) bool, tokens with loss; None: all valid tokens are scored.
        """
        base, stage = base_of(causal_model(model)), "training" if torch.is_grad_enabled() else "scoring"
        if self.features.sharing[stage].reason is not None:
            return None
        lengths, skipping = None, self.skipping
        if tokens is not None:
            is_empty = skipping.rows and skipping.padding and not skipping.runs_images(inputs) and not tokens.any()
            text = find_text(inputs, base.config) if is_empty else None
            inputs = inputs if text is None else text
            lengths = [1] if text is not None else skipping.lengths(inputs, tokens, base.config)
        names = inputs.keys() - {"logits_to_keep", "num_images", "num_tiles"}
        given = drop_empty_images({name: inputs[name] for name in names})
        try:
            check_inputs(given, base.config)
            split = find_split(given, base.config, inputs["input_ids"].size(1) - 1 - inputs["logits_to_keep"])
            return lay_out(base, given, split, lengths)
        except UnsupportedModel:
            if self.policy.training:
                self._report.add(len(inputs["input_ids"]), len(inputs["input_ids"]))
            return None

    def _rows_of_chunk(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of rows of a scoring chunk, the same on every process."""
        args, trains, most = self.args, self.policy.training, self.args.max_tokens_per_micro_batch
        size = args.num_generations if trains else args.num_generations_eval or args.num_generations
        group: Any = size if self.features.share_scoring.enabled else 1
        rows = self.rows.given if trains else args.per_device_eval_batch_size
        rows = round_up_to_groups(rows, group)
        if most is None:
            return rows
        columns = torch.tensor([inputs["input_ids"].size(1), inputs["logits_to_keep"]], device=self.accelerator.device)
        longest, completion = self.accelerator.gather(columns).view(-1, 2).amax(0).tolist()
        return min(rows, rows_within(most, group, longest, completion))

    def _can_skip_pass(self, inputs: Mapping[str, Any], want: Want, tokens: Tensor) -> bool:
        """Whether a micro-batch without loss can be skipped: all weights have gradients already.

        Where processes exchange gradients, parts of weights, or whether they have images, all have to run the model.
        """
        exchanges = self.accelerator.sync_gradients or self.dummy_image is not None
        alone = self.accelerator.num_processes == 1 or not exchanges
        whole = self.accelerator.distributed_type in _WHOLE
        skips = self.skipping.rows and self.skipping.padding and not self.skipping.runs_images(inputs)
        if not (alone and whole and skips) or want.reads_states or bool(tokens.any()):
            return False
        return all(weight.grad is not None for weight in self.policy.parameters() if weight.requires_grad)

    @contextmanager
    def around_generation(self, model: nn.Module, *, counts: bool = True) -> Iterator[None]:
        """Share prompts in generations of this block, with cached image features.

        Args:
            model: the model that generates, also wrapped.
            counts: whether metrics count these rows.
        """
        shares = self.features.share_generation.enabled
        modes = {"agree": self.agree} if self.is_sharded else {}
        sharing: Any = share_prompts(model, 1, warns=False, **modes) if shares else ignore_empty_images(model)
        with (
            self.vision_cache.around(model, counts=counts),
            sharing as report,
            nullcontext() if self.dummy_image is None else self.dummy_image.around(model, True),
        ):
            yield
        if shares and counts:
            self._report.add(report.rows, report.prompts)

    def metrics(self) -> dict[str, float]:
        """Return the prompts computed per row since the last call; empty without rows."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}


_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)  # processes hold all weights


def rows_within(most_tokens: int, group: int, longest: int, completion: int) -> int:
    """Return the number of rows that fit into a budget of tokens, at least one.

    Args:
        most_tokens: `max_tokens_per_micro_batch`.
        group: G where prompts are shared, so that whole groups pass if one fits; 1 where they are not.
        longest: P + T.
        completion: T.
    """
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
