"""verl's FSDP engine: its pass for old log-probabilities measures signals, its loss may look at perturbed images.

What to measure comes in the batch (`vgr`, from the trainer); a batch without it passes as in verl.
"""

from typing import Any

import torch
from torch import distributed
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.inside_verl.cached_forward import naming_its_cache
from vgr_trl.integrations.verl.inside_verl.flash_calls import looked_up
from vgr_trl.integrations.verl.losses import TermsAtHand, lay_terms_at_hand
from vgr_trl.integrations.verl.measured_pass import Layout, MeasuredPass, packed_layout, padded_layout
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.integrations.verl.perturbed import perturb_row
from vgr_trl.signals.dependency import visual_dependency
from vgr_trl.signals.measurement import policy_is_active

KEY = "vgr"  # of the batch


class SignalEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine and, in passes whose batch asks for it, attention and dependency beside log-probabilities.

    `forward_step`: measures around `super()`; makes a second pass of `super()` over perturbed images where the
    dependency or the perception loss needs one.
    """

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Return verl's loss and outputs; those of a measured pass have columns of signals among `model_output`."""
        given = tu.get_non_tensor_data(data=micro_batch, key=KEY, default=None)
        if given is None or (forward_only and not policy_is_active(self.module)):
            return super().forward_step(micro_batch, loss_function, forward_only)
        options = SignalOptions.read(given["options"])
        if forward_only:
            return self._measured_step(micro_batch, loss_function, options, given)
        return self._training_step(micro_batch, loss_function, options, given)

    def _measured_step(
        self, micro_batch: Any, loss_function: Any, options: SignalOptions, given: dict[str, Any]
    ) -> Any:
        if options.measures_attention:
            self._refuse_unmeasurable()
            measured = MeasuredPass(
                self.module, self._layout(micro_batch), options, given["special_token_ids"], agree=self._all_agree
            )
            with naming_its_cache(self.module), looked_up(self.module), measured.active():
                loss, output = super().forward_step(micro_batch, loss_function, True)
            output["model_output"] |= self._nested(micro_batch, measured)
            self.sharing = measured.report
        else:
            loss, output = super().forward_step(micro_batch, loss_function, True)
        if options.needs_dependency:
            perturbed = self._perturbed(micro_batch, options, given)
            _, other = super().forward_step(perturbed, loss_function, True)
            plain = output["model_output"]["log_probs"]
            dependency = visual_dependency(
                plain.values().unsqueeze(0), other["model_output"]["log_probs"].values().unsqueeze(0)
            )[0]
            blind = [not _has_pixels(inputs) for inputs in _rows_of_images(micro_batch, len(plain.offsets()) - 1)]
            lengths = plain.offsets().diff()
            dark = torch.tensor(blind, device=dependency.device).repeat_interleave(lengths)
            output["model_output"]["vgr_dependency"] = torch.nested.nested_tensor_from_jagged(
                dependency.masked_fill(dark, torch.nan), plain.offsets()
            )
        return loss, output

    def _training_step(
        self, micro_batch: Any, loss_function: Any, options: SignalOptions, given: dict[str, Any]
    ) -> Any:
        logps = None
        if options.uses_perception_loss:
            kept: dict[str, Any] = {}

            def keep(model_output: Any, data: Any, dp_group: Any = None) -> Any:
                kept["logps"] = no_padding_2_padding(model_output["log_probs"], data)
                return kept["logps"].sum() * 0, {}

            super().forward_step(self._perturbed(micro_batch, options, given), keep, False)
            logps = kept["logps"]
        with lay_terms_at_hand(TermsAtHand(options, logps)):
            return super().forward_step(micro_batch, loss_function, False)

    def _layout(self, micro_batch: Any) -> Layout:
        ids = micro_batch["input_ids"]
        lengths = ids.offsets().diff()
        prompts = micro_batch["prompts"]
        prompt_lengths = (
            prompts.offsets().diff()
            if prompts.is_nested
            else micro_batch["attention_mask"][:, : prompts.shape[1]].sum(dim=1)
        )
        if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            tokens = ids.values()
            pad = self._get_packed_pad_size(len(tokens))
            return packed_layout(tokens, lengths.tolist(), prompt_lengths.tolist(), pad)
        padded = torch.nested.to_padded_tensor(ids, padding=0)
        columns = torch.arange(padded.size(1), device=padded.device)
        return padded_layout(padded, columns < lengths.unsqueeze(1), columns < prompt_lengths.unsqueeze(1))

    def _nested(self, micro_batch: Any, measured: MeasuredPass) -> dict[str, torch.Tensor]:
        offsets, present = micro_batch["input_ids"].offsets(), measured.layout.present
        return {
            name: torch.nested.nested_tensor_from_jagged(column[present].float(), offsets)
            for name, column in measured.columns.items()
        }

    def _perturbed(self, micro_batch: Any, options: SignalOptions, given: dict[str, Any]) -> Any:
        count = len(micro_batch["input_ids"].offsets()) - 1
        rows = [
            perturb_row(inputs, options, given["step"], given["black"])
            for inputs in _rows_of_images(micro_batch, count)
        ]
        perturbed = micro_batch.clone(recurse=False)
        tu.assign_non_tensor_stack(perturbed, "multi_modal_inputs", rows)
        return perturbed

    def _refuse_unmeasurable(self) -> None:
        if self.use_ulysses_sp:
            raise ConfigError(
                "Attention cannot be measured where sequences are cut over processes: set "
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1."
            )

    def _all_agree(self, mine: bool) -> bool:
        answer = torch.tensor(float(mine), device=next(self.module.parameters()).device)
        distributed.all_reduce(answer, op=distributed.ReduceOp.MIN, group=self.get_data_parallel_group())
        return bool(answer)


def _rows_of_images(micro_batch: Any, count: int) -> list[dict[str, Any]]:
    """Pixel inputs of each row, empty for rows without images."""
    given = micro_batch.get("multi_modal_inputs", None)
    rows = [None] * count if given is None else list(given)
    return [dict(getattr(row, "data", row) or {}) for row in rows]


def _has_pixels(inputs: dict[str, Any]) -> bool:
    return inputs.get("pixel_values") is not None
