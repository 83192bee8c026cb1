"""`DAPOTrainer`: TRL's `GRPOTrainer` with the stages of this library between its generation and its loss."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer

from vgr_trl.batch.inputs import (
    Prompts,
    build_scoring_batch,
    with_perturbed_rows,
)
from vgr_trl.compat.completion_tables import in_texts
from vgr_trl.compat.gloo_exit import close_group_at_exit
from vgr_trl.compat.logged_images import images_logged_by_all
from vgr_trl.compat.token_types import with_causal_completions
from vgr_trl.compat.vllm_images import plan_vllm_images
from vgr_trl.config import DAPOConfig
from vgr_trl.config.effects import options_without_effect
from vgr_trl.credit import coefficient_warning, shape_advantages
from vgr_trl.data.rows.columns import IMAGE_COLUMNS, images_of
from vgr_trl.errors import ConfigError
from vgr_trl.reporting.views.model_card import TAGS, TRL_PAPER, extended_card, method_tags
from vgr_trl.reporting.views.model_use import about_trainer
from vgr_trl.rewards.finite import refuse_infinite
from vgr_trl.rewards.groups import gather_groups, needed_columns
from vgr_trl.rewards.outcome import checked
from vgr_trl.rewards.registry import hardened
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.sharing import (
    Place,
    SharingReport,
    leave_out_empty_images,
    plan_sharing,
    replaced,
    share_prompts,
    shuffle_by_group,
    whole_groups,
)
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals.head import without_head
from vgr_trl.signals.reward_columns import SINGLE_COLUMNS, attention_metrics, measure_segments, reward_columns
from vgr_trl.training.checkpoints.folders import resolve_checkpoint, resume_mode
from vgr_trl.training.checkpoints.order import continue_order, save_generation
from vgr_trl.training.checkpoints.shares import load_weights, whole_checkpoint
from vgr_trl.training.choose import GroupChoice
from vgr_trl.training.collapse_watch import CollapseWatch
from vgr_trl.training.host import check_attributes, check_seams
from vgr_trl.training.loss import entropy_term, perception_term, valid_tokens
from vgr_trl.training.measure import plan_measurement
from vgr_trl.training.perceive import perceive
from vgr_trl.training.prepare import (
    as_list,
    check_rewards,
    drop_prompts_over_limit,
    refuse_images_without_vision,
    refuse_targets_without_module,
    refuse_too_few_prompts,
)
from vgr_trl.training.ready_data import make_data_ready, with_processor
from vgr_trl.training.record import RolloutRecorder
from vgr_trl.training.step_metrics import Throughput, approximate_kl, token_means, weigh_by_tokens

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

    _tag_names = GRPOTrainer._tag_names + list(TAGS)
    _name = "DAPO"
    _paper = TRL_PAPER

    args: DAPOConfig
    data_source: str | None = None  # where the data come from, for the model card
    model: Any
    _logs: Any
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
        rewards = hardened(as_list(reward_funcs)) if args.vgr_hard_negative else as_list(reward_funcs)
        self._reward_schedule = RewardSchedule.for_rewards(rewards, args.reward_weights, args.early_reward_weights)
        rewards = [
            self._over_whole_groups(reward) if needed_columns(reward) is not None else reward for reward in rewards
        ]
        self._throughput = Throughput()
        self._rewards_with_nan: set[str] = set()
        self._training_logps: torch.Tensor | None = None
        self._loss_inputs: dict[str, Any] | None = None
        self._streamed_prompts_too_long = 0
        self._token_counts: list[float] = []  # valid tokens of the micro-batches since the last log
        self.train_sampler: Any = None

        super().__init__(model, rewards, args, *rest, **with_processor(model, rest, options))
        close_group_at_exit()
        check_attributes(self)
        if options.get("peft_config") is not None:
            refuse_targets_without_module(self.accelerator.unwrap_model(self.model))

        make_data_ready(self)
        refuse_images_without_vision(self)
        self._measurement = plan_measurement(self)
        check_rewards(self, self._measurement.columns)
        if (limit := args.max_prompt_length) is not None:
            drop_prompts_over_limit(self, limit, self._count_streamed_prompt)
        refuse_too_few_prompts(self)
        self.sharing = plan_sharing(self)
        self._sharing_report = SharingReport()
        self._choice = GroupChoice(self)
        self._vllm_images = plan_vllm_images(self)
        self._recorder = RolloutRecorder(self)
        self.collapse_watch = CollapseWatch(self)
        self.add_callback(self.collapse_watch)
        if self.accelerator.is_main_process:
            self._say_at_start()

    # Before the first generation

    def _say_at_start(self) -> None:
        """One line on where prompts are shared, at the level that is shown by default; one on risky coefficients."""
        args = self.args
        logger.warning(str(self.sharing))
        risk = coefficient_warning(args.perception_loss_weight, args.der_loss_weight1, args.der_loss_weight2)
        if risk is not None:
            logger.warning(risk)
        for name, why in options_without_effect(self).items():
            logger.warning(f"{name} is without effect because {why}.")

    def _over_whole_groups(self, reward: Any) -> Any:
        state = PartialState()
        return gather_groups(
            reward, gather_object, state.process_index, state.num_processes, self._completions_per_prompt
        )

    def _completions_per_prompt(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

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

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Add to TRL's: `True` and `latest` find the newest complete checkpoint; one that is not is refused."""
        checkpoint = resolve_checkpoint(resume_mode(resume_from_checkpoint), Path(str(self.args.output_dir)))
        return super().train(checkpoint, *args, **options)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Keep TRL's sampler, whose order a continued run takes up."""
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Add to TRL's: the checkpoint is complete once all is written, and not before; a full disk is named."""
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with whole_checkpoint(folder, self.accelerator, self.args.should_save):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Add to the parent's: the replay buffer, and what is left of a generation batch."""
        super()._save_rng_state(output_dir)
        self._choice.save(Path(output_dir))
        save_generation(self, Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Add to TRL's: the replay buffer, the order of the prompts, and what is left of a generation batch."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._choice.load(Path(checkpoint))
            continue_order(self, Path(checkpoint))

    # While training

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Add to TRL's: keep the completions of a prompt in one micro-batch where that changes nothing."""
        if not self.sharing.regroups:
            return super()._prepare_inputs(generation_batch)
        with replaced(grpo_trainer, "shuffle_sequence_dict", shuffle_by_group):
            return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Add to TRL's: keep the prompts, compute each once, measure attention if `attention_source` says so.

        A colocated vLLM gets one placeholder token per image, which is what it expects.
        """
        self._measurement.keep_prompts(Prompts(prompt_ids, images, multimodal_fields))
        if self._vllm_images is not None:
            prompt_ids, images = self._vllm_images.prepared(prompt_ids, images, multimodal_fields)
        with self._shared(self.sharing.generation, self.model), self._measurement.generation(self.model):
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)

    @contextmanager
    def _shared(self, place: Place, model: Any, completion_length: int | None = None) -> Iterator[None]:
        agree = self._all_agree if self.sharing.sharded else None
        if place.reason_off is not None:
            generates = completion_length is None
            with leave_out_empty_images(model, agree=None if generates else agree):
                yield
            return
        with share_prompts(model, completion_length, agree=agree) as report:
            yield
        self._sharing_report.add(report)

    def _all_agree(self, shares: bool) -> bool:
        agreed = self.accelerator.gather(torch.tensor([shares], device=self.accelerator.device))
        return bool(agreed.all())

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Add to TRL's: when training, measure what depends on the image, and spread the advantages over the tokens.

        Rows with a null image get an empty list of images, which TRL knows; on the null it fails. Some are recorded.
        """
        with self._measurement.rollout(), self._recorder.rollout(len(inputs)):
            batch = self._generate_judge_and_perceive(inputs)
            self._recorder.keep(batch)
            if self.model.training:
                chosen, signals, live = self._choice.choose(batch, self._measurement.signals)
                batch = self._spread(chosen, signals, live)
                self._recorder.trained_on(chosen["advantages"], batch["advantages"], self._choice.replaced)
            return with_perturbed_rows(batch)

    def _generate_judge_and_perceive(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation and judgement of these rows, and when training the pass over perturbed images."""
        if any(name in inputs[0] for name in IMAGE_COLUMNS) and not all(map(images_of, inputs)):
            inputs = [{**row, "images": images_of(row)} for row in inputs]
        self._rollout_rows = inputs
        with images_logged_by_all(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
        if self.model.training:
            perceive(self, batch)
        return batch

    def _spread(self, batch: dict[str, Any], signals: Any, live: torch.Tensor) -> dict[str, Any]:
        """The batch with advantages (N, T) instead of (N,), if a rule of credit is on."""
        if not self.args.shapes_advantages:
            return batch
        advantages, metrics = shape_advantages(
            batch["advantages"], signals, self.args, shaped=live.to(signals.mask.device), gather=self.accelerator.gather
        )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return {**batch, "advantages": advantages}

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Add to TRL's: an empty list instead of None for a row without images among rows with some."""
        self._measurement.keep_messages(prompts)
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, None if images is None else [row_images or [] for row_images in images], fields

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Add to TRL's: measure completions, give rewards the signals, set this step's weights, check rewards."""
        if self._measurement.active and self._measurement.wanted.scoring:
            if self._measurement.signals is None:
                self._score_rollout(completion_ids_list)
            inputs = self._with_signal_columns(inputs)
        if self._reward_schedule.changes:
            weights = self._reward_schedule.weights_at(self.state.global_step, self._early_steps())
            self.reward_weights[: len(weights)] = torch.tensor(weights)
        with replaced(self, "reward_funcs", self._checked_rewards()):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_per_func = rewards
        refuse_infinite(rewards, self.reward_func_names, inputs, len(inputs) * self.accelerator.process_index)
        for reward, name, undefined in zip(self.reward_funcs, self.reward_func_names, rewards.isnan().T, strict=True):
            mode = "train" if self.model.training else "eval"
            self._metrics[mode][f"rewards/{name}/not_applicable"].append(undefined.float().mean().item())
            if isinstance(reward, torch.nn.Module) and undefined.any():
                self._warn_of_nan(name, int(undefined.sum()))
        return rewards

    def _checked_rewards(self) -> list[Any]:
        return [
            reward if isinstance(reward, torch.nn.Module) else checked(reward, name, self._warn_of_nan, trainer=self)
            for reward, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

    def _warn_of_nan(self, name: str, count: int) -> None:
        if name not in self._rewards_with_nan:
            self._rewards_with_nan.add(name)
            logger.warning(
                f"The reward {name} returned NaN for {count} completions: they count as not applicable, as None does "
                f"(metric rewards/{name}/not_applicable; this is said once). Return None where that is meant."
            )

    def _score_rollout(self, completion_ids: list[list[int]]) -> None:
        """Make the measured pass, as TRL makes its own for old log-probabilities, as far as it is needed."""
        batch = build_scoring_batch(
            self._measurement.prompts,
            completion_ids,
            pad_token_id=self._tokenizer.pad_token_id,
            vision_token_ids=self._measurement.vision_token_ids,
            valid=None if not self.mask_truncated_completions else self._not_truncated(completion_ids),
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        inputs: Any = Trainer._prepare_inputs(self, batch.inputs())
        if self._measurement.needs_head:
            self._score(inputs)
        elif self._measurement.generated_mass is not None:
            self._measurement.take_generated(inputs["attention_mask"][:, -inputs["logits_to_keep"] :])
        else:
            with without_head(self.model):
                self._score(inputs)

    def _score(self, inputs: dict[str, Any]) -> Any:
        """Log-probabilities, entropies if measured, and router loss of the policy, as TRL scores a rollout batch."""
        args = self.args
        kwargs: Any = args.gradient_checkpointing_kwargs
        chunk = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with torch.no_grad(), disable_gradient_checkpointing(self.model, kwargs):
            return self._get_per_token_logps_and_entropies(self.model, batch_size=chunk, **inputs)

    def _with_signal_columns(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the rows with the columns of `SIGNAL_COLUMNS`, which the tables and metrics get too."""
        mass = self._measurement.signals.attention
        if mass is None:
            return inputs
        segmentation = self.args.attention_segments, self.args.mdi_balance_ratio
        segments = measure_segments(mass, *segmentation)
        mode = "train" if self.model.training else "eval"
        prompt = self._measurement.prompt_mass
        of_prompt = None if prompt is None else measure_segments(prompt, *segmentation)
        for name, value in attention_metrics(segments, self.accelerator.gather, of_prompt).items():
            self._metrics[mode][name].append(value)
        columns = reward_columns(segments)
        self._mdi_balance_scores_current_batch = columns["mdi_balance"]  # what rewards of our users' scripts read
        for name in SINGLE_COLUMNS:
            self._log_completion_extra(name, columns[name])
        columns["mdi_balance_ratio"] = [self.args.mdi_balance_ratio] * len(inputs)
        return [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(inputs)]

    def _not_truncated(self, completion_ids: list[list[int]]) -> list[bool]:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return [ids[-1] in ends for ids in completion_ids]

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

        A pass without gradients runs in chunks of whole groups, so that there is something to share. Token types of
        completions that would let them see their future are corrected.
        """
        trains = torch.is_grad_enabled()
        place = self.sharing.training if trains else self.sharing.scoring
        if batch_size is not None and not trains and place.reason_off is None:
            batch_size = whole_groups(batch_size, self._completions_per_prompt())
        kwargs = with_causal_completions(kwargs, causal_model(model).config, logits_to_keep)
        score = partial(
            super()._get_per_token_logps_and_entropies,
            model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs,
        )  # fmt: skip
        with self._shared(place, model, logits_to_keep):
            if not trains and model is self.model and self._measurement.is_due(model):
                scored = self._measurement.measure(
                    model, input_ids, attention_mask, logits_to_keep, partial(score, compute_entropy=True)
                )
            else:
                scored = score()
        if trains:
            self._training_logps = scored[0]
            if self._loss_inputs is not None:
                self._choice.first_pass(self._loss_inputs, scored[0])
                self._loss_inputs = None
        return scored

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Add to TRL's: the terms that are no advantages; the metric `approx_kl`, the counts of the throughput."""
        self._loss_inputs = inputs if self.model.training else None
        loss = super()._compute_loss(model, inputs)
        logps, self._training_logps = self._training_logps, None
        if self.model.training and logps is not None:
            self._measure_step(logps.detach(), inputs)
            loss = loss + entropy_term(self, logps, inputs) + perception_term(self, model, logps, inputs)
            self._training_logps = None  # those of the pass over perturbed images
        return loss

    def _measure_step(self, logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        mask = valid_tokens(inputs)  # (N, T)
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        kl = approximate_kl(logps, old_logps, mask)  # (N,)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        rows = torch.tensor(mask.size(0), device=mask.device)
        local = torch.stack([kl.sum(), mask.sum().float(), tokens.float(), rows.float()])
        kl_sum, valid, all_tokens, all_rows = self.accelerator.reduce(local, reduction="sum").tolist()
        self._metrics["train"]["approx_kl"].append(kl_sum / max(valid, 1.0))
        self._token_counts.append(valid)
        self._throughput.add(tokens=all_tokens, samples=all_rows)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to TRL's: throughput and reward weights, once per log of training steps; texts that tables can hold."""
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
        training = self.model.training
        if training:
            weigh_by_tokens(self._metrics["train"], token_means(self.args), self._token_counts)
            self._token_counts.clear()
        with in_texts(self._logs):
            super().log(logs, start_time)
        self._recorder.log(logs, "train" if training else "eval")

    def create_model_card(  # type: ignore[override]  # TRL's differs from its parent's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Add to TRL's: tags, rewards, the options that were on, and the papers to cite."""
        rewards = self.reward_func_names
        super().create_model_card(model_name, dataset_name, [*as_list(tags), *method_tags(self.args, rewards)])
        if self.is_world_process_zero():
            file = Path(str(self.args.output_dir), "README.md")
            about = about_trainer(self, model_name, dataset_name or self.data_source)
            card = extended_card(file.read_text(encoding="utf-8"), self.args, rewards, about)
            file.write_text(card, encoding="utf-8")


def _default_config(model: Any) -> DAPOConfig:
    name = model if isinstance(model, str) else model.config._name_or_path
    return DAPOConfig(f"{name.rstrip('/').split('/')[-1]}-DAPO")
