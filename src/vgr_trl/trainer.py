"""`DAPOTrainer`: TRL's `GRPOTrainer` with the stages of this library between its generation and its loss."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from vgr_trl.batch.inputs import Prompts, with_perturbed_rows
from vgr_trl.compat.completion_tables import in_texts
from vgr_trl.compat.gloo_exit import close_group_at_exit
from vgr_trl.compat.logged_images import images_logged_by_all
from vgr_trl.compat.round_logs import let_tables_hold
from vgr_trl.compat.token_types import with_causal_completions
from vgr_trl.compat.vllm_images import plan_vllm_images
from vgr_trl.config import DAPOConfig
from vgr_trl.reporting.views.card.model_card import TAGS, TRL_PAPER, method_tags
from vgr_trl.rewards.registry import hardened
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.sharing import replaced, whole_groups
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.signals.reward_columns import SINGLE_COLUMNS
from vgr_trl.signals.rollout import policy_is_active
from vgr_trl.training.checkpoints.order import PromptOrder
from vgr_trl.training.checkpoints.resumable import ResumableTrainer
from vgr_trl.training.choice.choose import GroupChoice
from vgr_trl.training.choice.further_prompts import FurtherPrompts
from vgr_trl.training.critic.critic import Critic
from vgr_trl.training.eval_sampling import sampling_of_mode
from vgr_trl.training.full_kl import FullKL
from vgr_trl.training.host import TRLHost
from vgr_trl.training.judge import Judge
from vgr_trl.training.kl import KLControl, constructed_with_reference, kl_penalty_reward, scored_by_reference
from vgr_trl.training.loss import added_terms
from vgr_trl.training.measure import plan_measurement, score_completions, signals_as_columns
from vgr_trl.training.metrics.clock import OptimizerClock, StageClock, timed, timed_pass
from vgr_trl.training.metrics.collapse_watch import CollapseWatch
from vgr_trl.training.metrics.step_metrics import StepMetrics
from vgr_trl.training.metrics.trackers import name_for_trackers
from vgr_trl.training.passes.around import Passes, plan_sharing, plan_skipping, plan_vision
from vgr_trl.training.passes.budget import TokenBudget, refuse_unfit_budget
from vgr_trl.training.passes.skip import LivePasses
from vgr_trl.training.perceive import perceive
from vgr_trl.training.recording.before import RecordBefore
from vgr_trl.training.recording.card import extend_card, rewards_of
from vgr_trl.training.recording.record import FlushRecords, RolloutRecorder
from vgr_trl.training.recording.taking import add_credit
from vgr_trl.training.regions import region_mask
from vgr_trl.training.rollout import Rollout, TrainingPass
from vgr_trl.training.spread import spread
from vgr_trl.training.start.prepare import (
    announce,
    as_list,
    check_config,
    check_data,
    data_has_images,
    default_config,
    find_idle_options,
    make_ready,
    model_name,
    over_whole_groups,
    refuse_unfit_choice,
    with_image_lists,
)
from vgr_trl.training.start.ready_data import with_processor
from vgr_trl.training.start.seams import check_seams


class DAPOTrainer(ResumableTrainer):
    """TRL's `GRPOTrainer` with DAPO's defaults, signals of what the model looked at, and credit by them.

    Takes the arguments of `GRPOTrainer`; `args` is a `DAPOConfig`. With its own options at their defaults it trains as
    `GRPOTrainer` does with `loss_type="dapo"`, `epsilon_high=0.28` and `beta=0`. It overrides, and adds to:

    - `_generate_and_score_completions`: the stages perceive, choose and spread; records.
    - `_tokenize_prompts`, `_generate_single_turn`: keep the prompts; prompts computed once; attention in generation.
    - `_calculate_rewards`: the measured pass, signals as columns, weights of this step, checks of what rewards return.
    - `_get_per_token_logps_and_entropies`: prompts computed once; signals; training passes over live tokens only.
    - `_compute_loss`: terms that are no advantages; metrics of the step; parts of few enough tokens.
    - `_prepare_inputs`: completions of a prompt, and those of similar length, in one micro-batch.
    - `log`, `create_model_card`: metrics, tables and records; what the card says.
    - by `ResumableTrainer`, `train`, `_get_train_sampler`, `_save_checkpoint`, `_save_rng_state`,
      `_load_optimizer_and_scheduler`, `_load_from_checkpoint`, `_load_best_model`: complete checkpoints, from which a
      run goes on as if undisturbed.

    Raises:
        UnsupportedTRLError: the installed TRL is not one this library is tested with.
        ConfigError: an option does not fit the reward functions, the model or the data.
        DataError: no row is within `max_prompt_length`, or fewer than a rollout takes.
    """

    _tag_names = GRPOTrainer._tag_names + list(TAGS)
    _name = "DAPO"
    _paper = TRL_PAPER
    data_source: str | None = None  # where the data come from, for the model card

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: DAPOConfig | None = None, *rest: Any, **options: Any
    ) -> None:
        """Check seams and options before TRL loads a model; check the data once its processor is known."""
        check_seams(GRPOTrainer)
        args = default_config(model) if args is None else args
        check_config(args, options)
        rewards = hardened(as_list(reward_funcs)) if args.vgr_hard_negative else as_list(reward_funcs)
        schedule = RewardSchedule.for_rewards(rewards, args.reward_weights, args.early_reward_weights)
        self._rollouts: list[Rollout] = []  # the one at hand, behind those it is a further round of
        self._pass: TrainingPass | None = None
        self.clock = StageClock()
        self._streamed_prompts_too_long = 0
        rewards = over_whole_groups(rewards, self._completions_per_prompt) + [kl_penalty_reward] * args.penalises_kl
        with constructed_with_reference(args):
            super().__init__(model, rewards, args, *rest, **with_processor(model, rest, options))
        self.beta = args.beta
        close_group_at_exit()
        make_ready(self, options.get("peft_config"))
        self._measurement = plan_measurement(self)
        check_data(self, self._measurement.columns, self._count_streamed_prompt)
        self.sharing = plan_sharing(self)
        refuse_unfit_choice(self, self.sharing.sharded)
        refuse_unfit_budget(self)
        self._passes = Passes(self.sharing, plan_vision(self, data_has_images(self)), self._all_agree)
        self._vllm_images = plan_vllm_images(self, data_has_images(self))
        self.host = TRLHost(self, self._begin, self._judge)
        prompts = None
        if args.dynamic_sampling == "resample":
            prompts = FurtherPrompts(self.host, self.train_dataset, bool(self.shuffle_dataset))
            let_tables_hold(self._logs, int(args.generation_batch_size or 0) * (1 + args.dynamic_sampling_max_rounds))
        self._choice = GroupChoice(self.host, self._measurement.wanted, prompts)
        self.skipping = plan_skipping(self, self._measurement.wanted)
        self._live_passes = LivePasses(self.skipping, self.host, self._choice, self._passes, self.sharing.training)
        self._budget = TokenBudget(self.host, self._live_passes, self.sharing.training.reason_off is None)
        self._rewards = Judge(self.host, self, schedule)
        full = FullKL(self.model, self.ref_model, self.temperature) if args.needs_full_kl else None
        self._kl, self._passes.hidden_reader = KLControl(self.host, full), None if full is None else full.reader
        self._critic = Critic(self.host, self.model) if args.uses_critic else None
        self._passes.reader = None if self._critic is None else self._critic.reader
        stages = (self._choice, self._kl, self._critic, PromptOrder(self, lambda: self._choice.waits))
        self.resumed = [stage for stage in stages if stage is not None]
        self._steps = StepMetrics(self.host)
        self._recorder = RolloutRecorder(self.host, self._measurement, self.processing_class, model_name(self.model))
        self.collapse_watch = CollapseWatch(self.host)
        self.add_callback(self.collapse_watch)
        self.add_callback(OptimizerClock(self.clock))
        name_for_trackers(self)
        if self._recorder.is_on:
            self.add_callback(FlushRecords(self._recorder))
            self.add_callback(RecordBefore(self, self._recorder.evaluated))
        self.idle_options = find_idle_options(self, self._measurement.wanted, schedule.changes)
        if self.accelerator.is_main_process:
            announce(self, self.sharing, self._passes.vision.plan, self.skipping, self.idle_options)

    def _completions_per_prompt(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _count_streamed_prompt(self) -> None:
        self._streamed_prompts_too_long += 1

    def _all_agree(self, shares: bool) -> bool:
        agreed = self.accelerator.gather(torch.tensor([shares], device=self.accelerator.device))
        return bool(agreed.all())

    def _log_all(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    # A rollout batch

    @property
    def _rollout(self) -> Rollout | None:
        return self._rollouts[-1] if self._rollouts else None

    @contextmanager
    def _begin(self, rows: list[dict[str, Any]], **options: Any) -> Iterator[Rollout]:
        """In this block the hooks below fill a new rollout; one within another is a further round of it."""
        self._rollouts.append(Rollout(with_image_lists(rows), **options))
        try:
            with self._passes.rollout(self.model.training):
                yield self._rollouts[-1]
        finally:
            self._rollouts.pop()

    def _judge(self, rollout: Rollout) -> Rollout:
        """TRL's generation and judgement of a rollout, and when training the pass over perturbed images."""
        with images_logged_by_all(self, rollout.rows), scored_by_reference(self):
            rollout.batch = super()._generate_and_score_completions(rollout.rows)
        if not self.model.training:
            return rollout
        if self._critic is not None:
            self._critic.judge(rollout)
        self._kl.keep_reference(rollout)
        with self.clock.stage("perceive"):
            return perceive(rollout, self.host, self._measurement)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Add to TRL's: when training, measure what depends on the image, choose groups, spread the advantages."""
        with self._begin(inputs, recorded=self._recorder.rows_due(len(inputs))) as rollout:
            rollout = self._judge(rollout)
            recorded = self._recorder.keep(rollout)
            if self.model.training:
                with self.clock.stage("choose"):
                    chosen, metrics = self._choice.choose(rollout)
                    self._log_all(metrics | self._kl.end_rollout())
                    if self._critic is not None:
                        chosen, metrics = self._critic.estimate(chosen)
                        self._log_all(metrics)
                    rollout, metrics = spread(chosen, self.host)
                    self._log_all(metrics)
                add_credit(recorded, chosen, chosen.batch["advantages"], rollout.batch["advantages"])
            self._recorder.write(rollout, recorded)
            return with_perturbed_rows(rollout.batch)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Add to TRL's: keep the prompts; an empty list instead of None for a row without images among others."""
        if self._rollout is not None and self._rollout.messages is None:
            self._rollout.messages = prompts
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, None if images is None else [row_images or [] for row_images in images], fields

    @timed("generation")
    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Add to TRL's: keep the prompts, compute each once, measure attention if `attention_source` says so; sampling
        of evaluations.

        A colocated vLLM gets one placeholder token per image, which is what it expects.
        """
        rollout, first_turn = self._rollout, False
        if rollout is not None and rollout.prompts is None:
            rollout.prompts, first_turn = Prompts(prompt_ids, images, multimodal_fields), True
        if self._vllm_images is not None:
            prompt_ids, images = self._vllm_images.prepared(prompt_ids, images, multimodal_fields)
        generate = partial(super()._generate_single_turn, prompt_ids, images, multimodal_fields, *args, **kwargs)
        with self._passes.around(self.sharing.generation, self.model), sampling_of_mode(self):
            if rollout is None or not (first_turn and self._measurement.in_generation):
                return generate()
            with self._measurement.generation_probe(self.model) as probe:
                generated = generate()
            rollout.generated_mass = probe.mass
            return generated

    @timed("reward")
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Add to TRL's: measure completions, give rewards the signals, set this step's weights, check rewards."""
        rollout, columns = self._rollout, dict[str, list[Any]]()
        if rollout is not None:
            rollout.judging = True
        if rollout is not None and self._measurement.wanted.scoring:
            if rollout.signals is None:
                score_completions(rollout, self.host, self._measurement, completion_ids_list)
            columns, metrics = signals_as_columns(rollout, self.host, self._measurement)
            for name in SINGLE_COLUMNS if "vgr" in columns else ():
                self._log_completion_extra(name, columns[name])
            # Read by rewards of our users' scripts, through the argument `trainer`.
            self._mdi_balance_scores_current_batch = columns.get("mdi_balance")
            penalties, more = self._kl.penalise(rollout)
            columns |= penalties
            self._log_all(metrics | more)
        rows = [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(inputs)]
        self._rewards.set_weights()
        with replaced(self, "reward_funcs", self._rewards.guarded(self.reward_funcs, rollout)):
            rewards = self._kl.without_unscored(
                super()._calculate_rewards(rows, prompts, completions, completion_ids_list)
            )
        self._log_all(self._rewards.check(rewards, self.reward_funcs, rows))
        if rollout is not None:
            rollout.rewards = rewards
        return rewards

    @timed_pass
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add to TRL's: compute each prompt once; measure the policy's pass over a rollout; train what is live.

        A pass without gradients runs in chunks of whole groups, so that there is something to share. Token types of
        completions that would let them see their future are corrected.
        """
        trains, rollout = torch.is_grad_enabled(), self._rollout
        place = self.sharing.training if trains else self.sharing.scoring
        if batch_size is not None and not trains and place.reason_off is None:
            batch_size = whole_groups(batch_size, self._completions_per_prompt())
        if batch_size is not None and not trains:
            size = input_ids.size(1), logits_to_keep, self._completions_per_prompt()
            batch_size = self._budget.scored_rows(batch_size, *size)
        kwargs = with_causal_completions(kwargs, causal_model(model).config, logits_to_keep)
        batch = model, input_ids, attention_mask, logits_to_keep
        plain = super()._get_per_token_logps_and_entropies
        if trains and self._pass is not None:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep}
            return self._live_passes.run(self._pass, model, plain, inputs | kwargs)
        is_policy = model is self.model and not trains and policy_is_active(model)
        if is_policy and rollout is not None and self._live_passes.gives_old_logps(rollout):
            return torch.full((len(input_ids), logits_to_keep), torch.nan, device=input_ids.device), None, None
        score = partial(plain, *batch, batch_size, **kwargs)
        is_due = rollout is not None and rollout.signals is None and self._measurement.wanted.scoring
        with self._passes.around(place, model, logits_to_keep):
            if rollout is not None and is_due and is_policy:
                scored, measured = self._measurement.measure(
                    *batch,
                    partial(score, compute_entropy=True),
                    generated_mass=rollout.generated_mass,
                    rows_with_maps=rollout.recorded or (),
                    region=region_mask(rollout, self.host, self._measurement, input_ids[:, :-logits_to_keep]),
                )
                rollout.signals, rollout.prompt_mass, rollout.maps = (
                    measured.signals, measured.prompt_mass, measured.maps,
                )  # fmt: skip
                rollout.values, rollout.hidden = self._passes.values(), self._passes.hidden()
            else:
                scored = score()
                if rollout is not None and (model is self.ref_model or not policy_is_active(model)):
                    rollout.reference_logps, rollout.reference_hidden = scored[0], self._passes.hidden()
        return scored

    # A micro-batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Add to TRL's: keep completions of a prompt, and rows of one length, together where that changes nothing."""
        if (shuffle := self._live_passes.shuffle(self.sharing.regroups)) is None:
            return super()._prepare_inputs(generation_batch)
        with replaced(grpo_trainer, "shuffle_sequence_dict", shuffle):
            return super()._prepare_inputs(generation_batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Add to TRL's: the terms that are no advantages; metrics of the step; parts of few enough tokens."""
        return self._budget.loss(model, inputs, self._loss_of_part)

    def _loss_of_part(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._pass = passed = TrainingPass(inputs)
        try:
            loss = super()._compute_loss(model, inputs)
            if passed.logps is None or not self.model.training:
                return loss
            self._log_all(self._steps.measure(passed, self._metrics["train"]))
            score = partial(self._get_per_token_logps_and_entropies, model, compute_entropy=True)
            terms, metrics = added_terms(passed, self.host, self._kl, lambda batch: score(**batch)[:2])
            self._log_all(metrics)
            if self._critic is None:
                return loss + terms
            self._log_all(self._critic.learn(passed, self._values_of))
            return (loss + terms) * (not self._critic.holds_policy())
        finally:
            self._pass = None

    def _values_of(self, critic: Any, inputs: dict[str, Any]) -> torch.Tensor:
        with replaced(self, "_pass", None):
            return self._get_per_token_logps_and_entropies(critic, **inputs)[0]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to TRL's: rates, timings and reward weights, once per log of training; texts that tables can hold."""
        training = self.model.training
        if training and (seconds := sum(times := self._metrics["train"].get("step_time", []))):
            weights = dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))
            logs |= self._steps.rates(seconds) | self._steps.skipped()
            logs |= self._passes.metrics() | self.clock.metrics(self.accelerator, times)
            logs |= {f"reward_weights/{name}": weight for name, weight in weights.items()}
            if self._streamed_prompts_too_long:
                logs["data/prompts_too_long"] = self._streamed_prompts_too_long
        if training:
            self._steps.merge(self._metrics["train"])
        with in_texts(self._logs):
            super().log(logs, start_time)
        self._recorder.log(logs, "train" if training else "eval")

    def create_model_card(  # type: ignore[override]  # TRL's differs from its parent's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Add to TRL's: tags, rewards, the options that were on, and the papers to cite."""
        tags = [*as_list(tags), *method_tags(self.args, rewards_of(self))]
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            extend_card(self, model_name, dataset_name or self.data_source)
