"""TRL's GRPOTrainer with prompt sharing at three of its methods, as the trainer of this library has it."""

from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from vgr_trl.sharing import SharingReport, replaced, share_prompts, shuffle_by_group, whole_groups, why_not_regroup


class SharingTrainer(GRPOTrainer):
    """Computes each prompt once in generation, in scoring and in training."""

    def __init__(self, *args: Any, regroup: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.training_report, self.scoring_report, self.generation_report = (SharingReport() for _ in range(3))
        reason = why_not_regroup(
            loss_type=self.loss_type,
            entropy_bonus=self._entropy_bonus_enabled,
            top_entropy_quantile=self.top_entropy_quantile,
            router_loss=self.aux_loss_enabled,
            steps_per_generation=self.args.steps_per_generation,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
        )
        self.regroups = reason is None if regroup is None else regroup

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with share_prompts(self.model) as report:
            output = super()._generate_single_turn(*args, **kwargs)
        self.generation_report.add(report)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        shuffle = shuffle_by_group if self.regroups else grpo_trainer.shuffle_sequence_dict
        with replaced(grpo_trainer, "shuffle_sequence_dict", shuffle):
            return super()._prepare_inputs(generation_batch)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if batch_size is not None and not torch.is_grad_enabled():
            batch_size = whole_groups(batch_size, self.num_generations)
        with share_prompts(model, logits_to_keep) as report:
            output = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )
        (self.training_report if torch.is_grad_enabled() else self.scoring_report).add(report)
        return output
