"""`DAPOTrainer`: TRL's `GRPOTrainer` with the stages of this library between its generation and its loss."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.trainer import grpo_trainer

from vgr_trl.checkpoints import load_weights
from vgr_trl.config import DAPOConfig
from vgr_trl.data.columns import IMAGE_COLUMNS, image_columns, images_of
from vgr_trl.data.lengths import drop_long_prompts
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.metrics import Throughput, approximate_kl
from vgr_trl.rewards.groups import gather_groups, needed_columns
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.rewards.signatures import check_callable
from vgr_trl.seams import check_attributes, check_seams
from vgr_trl.sharing import (
    Place,
    SharingReport,
    plan_sharing,
    replaced,
    share_prompts,
    shuffle_by_group,
    whole_groups,
)

logger = logging.get_logger(__name__)


class DAPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with DAPO's defaults, scheduled reward weights and rewards that see whole groups.

    Takes the arguments of `GRPOTrainer`; `args` is a `DAPOConfig`. With its own options at their defaults it trains as
    `GRPOTrainer` does with `loss_type="dapo"`, `epsilon_high=0.28` and `beta=0`.

    Raises:
        UnsupportedTRLError: the installed TRL is not one this library is tested with.
        ConfigError: an option does not fit the reward functions, the model or the data.
        DataError: no row is within `max_prompt_length`, or fewer than a rollout takes.
    """

    args: DAPOConfig
    model: Any
    train_dataset: Any
    eval_dataset: Any
    num_generations: int
    num_generations_eval: int

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: DAPOConfig | None = None, *rest: Any, **options: Any
    ) -> None:
        """Check seams and options before TRL loads a model; check the data once its processor is known."""
        check_seams(GRPOTrainer)
        args = _default_config(model) if args is None else args
        if not isinstance(args, DAPOConfig):
            raise ConfigError(f"args is a {type(args).__name__}: give a DAPOConfig, which takes the same options.")
        if args.max_prompt_length is not None and options.get("environment_factory") is not None:
            raise ConfigError(
                "max_prompt_length needs prompts from the data, but environment_factory makes them: drop one."
            )
        rewards = _as_list(reward_funcs)
        self._reward_schedule = RewardSchedule.for_rewards(rewards, args.reward_weights, args.early_reward_weights)
        rewards = [
            self._over_whole_groups(reward) if needed_columns(reward) is not None else reward for reward in rewards
        ]
        self._throughput = Throughput()
        self._training_logps: torch.Tensor | None = None
        self._streamed_prompts_too_long = 0

        super().__init__(model, rewards, args, *rest, **options)
        check_attributes(self)

        self._refuse_images_without_vision()
        self._check_rewards()
        if (limit := args.max_prompt_length) is not None:
            self.train_dataset = self._without_long_prompts(self.train_dataset, limit, "train")
            self.eval_dataset = self._without_long_prompts(self.eval_dataset, limit, "eval")
        self._refuse_too_few_prompts()
        self.sharing = plan_sharing(self)
        self._sharing_report = SharingReport()
        if self.accelerator.is_main_process:
            logger.info(str(self.sharing))

    # Before the first generation

    def _over_whole_groups(self, reward: Any) -> Any:
        state = PartialState()
        return gather_groups(
            reward, gather_object, state.process_index, state.num_processes, self._completions_per_prompt
        )

    def _completions_per_prompt(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _named_datasets(self) -> Iterator[tuple[str, Any]]:
        """The train data and every part of the eval data, with a name for messages."""
        for name, dataset in (("train", self.train_dataset), ("eval", self.eval_dataset)):
            parts = dataset.values() if isinstance(dataset, dict) else [dataset]
            yield from ((name, part) for part in parts if part is not None)

    def _refuse_images_without_vision(self) -> None:
        for name, dataset in self._named_datasets():
            if not self._is_vlm and (columns := image_columns(dataset)):
                raise ConfigError(
                    f"The {name} data has a column `{columns[0]}`, but {type(self.model).__name__} with "
                    f"{type(self.processing_class).__name__} reads text only: use a vision-language model with its "
                    "processor, or remove the column."
                )

    def _check_rewards(self) -> None:
        """Refuse rewards that cannot be called with the columns; environments add columns of their own later."""
        if self.environment_factories is not None or self.rollout_func is not None:
            return
        for _, dataset in self._named_datasets():
            if (columns := getattr(dataset, "column_names", None)) is not None:
                for reward in self.reward_funcs:
                    check_callable(reward, columns)

    def _without_long_prompts(self, dataset: Any, limit: int, name: str) -> Any:
        if isinstance(dataset, dict):
            return type(dataset)({key: self._without_long_prompts(part, limit, key) for key, part in dataset.items()})
        if dataset is None:
            return None
        on_dropped = self._count_streamed_prompt if dataset is self.train_dataset else lambda: None
        return drop_long_prompts(dataset, self._prompt_length, limit, name, on_dropped)

    def _refuse_too_few_prompts(self) -> None:
        """A rollout takes distinct prompts; TRL drops a smaller rest, which here would be everything."""
        prompts = self.args.prompts_per_rollout
        rows = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else prompts
        if rows < prompts:
            raise DataError(
                f"The train data has {rows} rows, but a rollout takes {prompts} prompts (generation_batch_size "
                f"{self.args.generation_batch_size} / num_generations {self.args.num_generations}): add rows, or lower "
                "per_device_train_batch_size or gradient_accumulation_steps."
            )

    def _prompt_length(self, row: Mapping[str, Any]) -> int:
        """Tokens of the row's prompt as the policy will read it, image tokens included."""
        prompt, images = row["prompt"], images_of(row)
        if images:
            if isinstance(prompt, str):
                raise DataError("A row with images has a text as its prompt: give a conversation (a list of messages).")
            prompt = prepare_multimodal_messages(prompt, images=images)
        return len(self._tokenize_prompts([prompt])[0][0])

    def _count_streamed_prompt(self) -> None:
        self._streamed_prompts_too_long += 1

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Replace the parent's where it would keep the weights of the start: for whole, unsharded models."""
        target = self.accelerator.unwrap_model(self.model if model is None else model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(target, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(target, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Replace the parent's for the same models, and for the same reason."""
        target = self.accelerator.unwrap_model(self.model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(target, PreTrainedModel):
            super()._load_best_model()
        else:
            load_weights(target, str(self.state.best_model_checkpoint))

    # While training

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Add to TRL's: keep the completions of a prompt in one micro-batch where that changes nothing."""
        if not self.sharing.regroups:
            return super()._prepare_inputs(generation_batch)
        with replaced(grpo_trainer, "shuffle_sequence_dict", shuffle_by_group):
            return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Add to TRL's: compute each prompt once while generating."""
        with self._shared(self.sharing.generation, self.model):
            return super()._generate_single_turn(*args, **kwargs)

    @contextmanager
    def _shared(self, place: Place, model: Any, completion_length: int | None = None) -> Iterator[None]:
        if place.reason_off is not None:
            yield
            return
        agree = self._all_agree if self.sharing.sharded else None
        with share_prompts(model, completion_length, agree=agree) as report:
            yield
        self._sharing_report.add(report)

    def _all_agree(self, shares: bool) -> bool:
        agreed = self.accelerator.gather(torch.tensor([shares], device=self.accelerator.device))
        return bool(agreed.all())

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Add to TRL's: an empty list of images, which it knows, for rows with a null image, on which it fails."""
        if any(name in inputs[0] for name in IMAGE_COLUMNS) and not all(map(images_of, inputs)):
            inputs = [{**row, "images": images_of(row)} for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Add to TRL's: an empty list instead of None for a row without images among rows with some."""
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, None if images is None else [row_images or [] for row_images in images], fields

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Add to TRL's: set the reward weights that hold at this step."""
        if self._reward_schedule.changes:
            weights = self._reward_schedule.weights_at(self.state.global_step, self._early_steps())
            self.reward_weights[: len(weights)] = torch.tensor(weights)
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _early_steps(self) -> int:
        total = self.state.max_steps
        return self._reward_schedule.early_steps(self.args.get_warmup_steps(total), total)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add to TRL's: compute each prompt once; keep the log-probabilities of a training pass for `_compute_loss`.

        A pass without gradients runs in chunks of whole groups, so that there is something to share.
        """
        trains = torch.is_grad_enabled()
        place = self.sharing.training if trains else self.sharing.scoring
        if batch_size is not None and not trains and place.reason_off is None:
            batch_size = whole_groups(batch_size, self._completions_per_prompt())
        with self._shared(place, model, logits_to_keep):
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )
        if trains:
            self._training_logps = logps.detach()
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Add to TRL's: the metric `approx_kl`, and the counts that the throughput is made of."""
        loss = super()._compute_loss(model, inputs)
        if self.model.training and self._training_logps is not None:
            self._measure_step(self._training_logps, inputs)
            self._training_logps = None
        return loss

    def _measure_step(self, logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (N, T)
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        kl = approximate_kl(logps, old_logps, mask)  # (N,)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        rows = torch.tensor(mask.size(0), device=mask.device)
        local = torch.stack([kl.sum(), mask.sum().float(), tokens.float(), rows.float()])
        kl_sum, valid, all_tokens, all_rows = self.accelerator.reduce(local, reduction="sum").tolist()
        self._metrics["train"]["approx_kl"].append(kl_sum / max(valid, 1.0))
        self._throughput.add(tokens=all_tokens, samples=all_rows)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to TRL's: throughput and reward weights, once per log of training steps."""
        if self.model.training and (seconds := sum(self._metrics["train"].get("step_time", []))):
            logs |= self._throughput.rates(seconds)
            logs |= {
                f"reward_weights/{name}": weight
                for name, weight in zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)
            }
            if self._sharing_report.rows:
                logs["sharing/prompts_per_row"] = self._sharing_report.prompts_per_row
                self._sharing_report = SharingReport()
            if self._streamed_prompts_too_long:
                logs["data/prompts_too_long"] = self._streamed_prompts_too_long
        super().log(logs, start_time)


def _as_list(reward_funcs: Any) -> list[Any]:
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def _default_config(model: Any) -> DAPOConfig:
    name = model if isinstance(model, str) else model.config._name_or_path
    return DAPOConfig(f"{name.rstrip('/').split('/')[-1]}-DAPO")
