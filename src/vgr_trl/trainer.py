"""`DAPOTrainer`: TRL's `GRPOTrainer` with the stages of this library between its generation and its loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import RewardFunc

from vgr_trl.added_loss import AddedLoss, FullKL, KLControl, constructed_with_reference, scored_by_reference
from vgr_trl.batch import Prompts, unmeasured, valid_tokens, with_perturbed_rows
from vgr_trl.callbacks import CollapseWatch, FiniteUpdates, StepMetrics, name_for_trackers, outlive_trackers
from vgr_trl.credit import shape_advantages
from vgr_trl.critic import Critic
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.images import ReadOnce, reads_alike
from vgr_trl.efficiency.loss_mask import SkippingPlan
from vgr_trl.efficiency.vision_cache import images_processed_once
from vgr_trl.forward_passes import EmittedReader, LivePasses, Passes, ScoringPasses, TokenBudget
from vgr_trl.generation import Generation, as_generated, blind_answers
from vgr_trl.measure import perceive, score_completions, signals_as_columns
from vgr_trl.metrics import OptimizerClock, StageClock
from vgr_trl.patches import (
    beside_training,
    forget_with_new_weights,
    images_logged_by_all,
    in_texts,
    let_tables_hold,
    plan_vllm_images,
    remove_oldest_tables,
    with_causal_completions,
)
from vgr_trl.prepare import (
    announce,
    as_list,
    check_data,
    checked_config,
    data_has_images,
    find_idle_options,
    make_ready,
    model_name,
    plan_measurement,
    plan_rewards,
    refuse_files_in_prompts,
    with_image_lists,
)
from vgr_trl.reporting.model_card import TAGS, TRL_PAPER, method_tags
from vgr_trl.reporting.recorder import FlushRecords, RolloutRecorder, add_credit, extend_card, rewards_of
from vgr_trl.resume import PromptOrder, ResumableTrainer, Resumed
from vgr_trl.rewards.groups import WholeGroups
from vgr_trl.rewards.loading import RewardSchedule, checked
from vgr_trl.rollout import Host, Rollout, TrainingPass, TRLHost
from vgr_trl.sampling import FurtherPrompts, GroupChoice
from vgr_trl.sharing.model_support import causal_model
from vgr_trl.sharing.sharing import SharingPlan
from vgr_trl.signals.named import SINGLE_COLUMNS
from vgr_trl.signals.scoring import Measurement
from vgr_trl.utils import RewardError, replaced
from vgr_trl.validate import (
    check_seams,
    plan_blank_image,
    plan_sharing,
    plan_skipping,
    plan_vision,
    refuse_unfit_options,
)

# ---------------------------------------------------------------------------------------------------------------------
# From one advantage per completion to one per token.


def spread(rollout: Rollout, host: Host) -> tuple[Rollout, dict[str, float]]:
    """Return the rollout with advantages (N, T) instead of (N,), if a rule of credit is on, and metrics."""
    if not host.args.shapes_advantages:
        return rollout, rollout.metrics
    assert rollout.live is not None
    signals = rollout.signals or unmeasured(valid_tokens(rollout.batch).bool())
    rows = len(signals.mask)
    first = host.accelerator.process_index * rows
    advantages, metrics = shape_advantages(
        rollout.batch["advantages"],
        signals,
        host.args,
        shaped=rollout.live.to(signals.mask.device),
        groups=torch.arange(first, first + rows, device=signals.mask.device) // host.num_generations,
        gather=host.accelerator.gather,
        completion_ids=rollout.batch["completion_ids"],
    )
    return replace(rollout, batch={**rollout.batch, "advantages": advantages}), rollout.metrics | metrics


# ---------------------------------------------------------------------------------------------------------------------
# Rewards as TRL calls them, and what comes back: one number per completion, finite, or none that applies.


logger = logging.get_logger(__name__)


class Judge:
    """Gives the rewards of a run what they read, and checks what they return.

    Args:
        trainer: what rewards with an argument `trainer` get.
    """

    def __init__(
        self, host: Host, trainer: object, schedule: RewardSchedule, measurement: Measurement, kl: KLControl
    ) -> None:
        self.host, self.trainer, self.schedule = host, trainer, schedule
        self._measurement, self._kl = measurement, kl
        self._with_nan: set[str] = set()

    def prepare(
        self, rollout: Rollout | None, completion_ids: list[list[int]]
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Set the weights of this step; return the columns that rewards get of the completions, and their metrics.

        Args:
            rollout: at hand, which is measured if TRL has not scored it; None: outside of one nothing is measured.
        """
        self._set_weights()
        if rollout is None:
            return {}, {}
        columns, metrics = blind_answers(rollout, self.host, completion_ids) if self._measurement.blind else ({}, {})
        self.host.show_columns(columns)
        measured, of_signals = self._measure(rollout, completion_ids)
        return columns | measured, metrics | of_signals

    def _measure(
        self, rollout: Rollout, completion_ids: list[list[int]]
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        rollout.judging = True
        if not self._measurement.wanted.scoring:
            return {}, {}
        if rollout.signals is None:
            score_completions(rollout, self.host, self._measurement, completion_ids)
        columns, metrics = signals_as_columns(rollout, self.host, self._measurement)
        if "vgr" in columns:
            self.host.show_columns({name: columns[name] for name in SINGLE_COLUMNS})
        penalties, of_kl = self._kl.penalise(rollout)
        return columns | penalties, metrics | of_kl

    def _set_weights(self) -> None:
        if self.schedule.changes:
            state = self.host.state
            early = self.schedule.early_steps(self.host.args.get_warmup_steps(state.max_steps), state.max_steps)
            weights = self.schedule.weights_at(state.global_step, early)
            self.host.reward_weights[: len(weights)] = torch.tensor(weights)

    def guarded(self, reward_funcs: Sequence[RewardFunc], rollout: Rollout | None) -> list[RewardFunc]:
        """Return the reward functions such that they return one number or None per completion, or fail by name.

        Args:
            rollout: at hand; one greedy completion has no others to be compared with, and earns 0 there.
        """
        alone = rollout is not None and rollout.greedy
        return [
            self._guarded(_zero if alone and isinstance(reward, WholeGroups) else reward, name)
            for reward, name in zip(reward_funcs, self.host.reward_names, strict=True)
        ]

    def _guarded(self, reward: RewardFunc, name: str) -> RewardFunc:
        if isinstance(reward, torch.nn.Module):
            return reward
        return checked(reward, name, self._warn_of_nan, self.trainer, self.host.args.reward_timeout)

    def check(
        self,
        rewards: torch.Tensor,
        reward_funcs: Sequence[RewardFunc],
        rollout: Rollout | None,
        rows: Sequence[Mapping[str, Any]],
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the rewards, and for which share of all completions each does not apply; the rollout keeps them.

        Args:
            rewards: of all processes, (N of all, F).

        Raises:
            RewardError: a reward is infinite.
        """
        rewards = self._kl.without_unscored(rewards)
        refuse_infinite(rewards, self.host.reward_names, rows, len(rows) * self.host.accelerator.process_index)
        metrics = {}
        for reward, name, undefined in zip(reward_funcs, self.host.reward_names, rewards.isnan().T, strict=True):
            metrics[f"rewards/{name}/not_applicable"] = undefined.float().mean().item()
            if isinstance(reward, torch.nn.Module) and undefined.any():
                self._warn_of_nan(name, int(undefined.sum()))
        if rollout is not None:
            rollout.rewards = rewards
        return rewards, metrics

    def _warn_of_nan(self, name: str, count: int) -> None:
        if name not in self._with_nan:
            self._with_nan.add(name)
            logger.warning(
                f"The reward {name} returned NaN for {count} completions: they count as not applicable, as None does "
                f"(metric rewards/{name}/not_applicable; this is said once). Return None where that is meant."
            )


def _zero(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [0.0] * len(completions)


def refuse_infinite(rewards: torch.Tensor, names: Sequence[str], rows: Sequence[Mapping[str, Any]], first: int) -> None:
    """Raise `RewardError` if a reward is infinite; NaN stands for one that does not apply.

    Args:
        rewards: of all processes, (N of all, number of functions); all processes raise together.
        first: number of the first of them among all.
    """
    infinite = rewards.isinf().nonzero().tolist()
    if not infinite:
        return
    row, function = infinite[0]
    here = f", {_shown(rows[row - first])}" if first <= row < first + len(rows) else ""
    raise RewardError(
        f"The reward {names[function]} is {rewards[row, function].item()} for row {row} of the {len(rewards)} of the "
        f"rollout batch{here}: return a finite float32 number, or None where the reward does not apply."
    )


def _shown(row: Mapping[str, Any]) -> str:
    """The row's `id`, if it has one, or the text that its prompt ends with."""
    if row.get("id") is not None:
        return f"of the data's row with id {row['id']!r}"
    prompt = row["prompt"]
    content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    if not isinstance(content, str):
        content = " ".join(part.get("text") or "" for part in content).strip()
    return f"whose prompt ends with {content[-80:]!r}"


# ---------------------------------------------------------------------------------------------------------------------
# The stages of a run, built once, of a trainer that TRL has constructed.


@dataclass(frozen=True)
class Stages:
    """What a rollout batch goes through, and what is around, in the order of data.

    Attributes:
        clock: how long each stage takes.
        measurement: what is measured of rollout batches.
        sharing: where prompts are computed once.
        skipping: what training passes leave out.
        passes: what is around each pass.
        generation, scoring: of completions, without gradients.
        judge: of rewards.
        kl: from the reference.
        critic: None without one.
        choice: of the groups that are trained on.
        live: passes with gradients.
        budget: of tokens in a pass; None without one.
        loss: what is added to TRL's.
        steps: metrics of training steps.
        recorder: of completions, for people to look at.
    """

    clock: StageClock
    measurement: Measurement
    sharing: SharingPlan
    skipping: SkippingPlan
    passes: Passes
    generation: Generation
    scoring: ScoringPasses
    judge: Judge
    kl: KLControl
    critic: Critic | None
    choice: GroupChoice
    live: LivePasses
    budget: TokenBudget | None
    loss: AddedLoss
    steps: StepMetrics
    recorder: RolloutRecorder

    def resumed(self, trainer: ResumableTrainer) -> list[Resumed]:
        """Return what a checkpoint of the trainer holds of its stages."""
        order = PromptOrder(trainer, self.choice.replay)
        return [part for part in (self.choice, self.kl, self.critic, order) if part is not None]


def build_stages(trainer: ResumableTrainer, host: TRLHost, schedule: RewardSchedule) -> Stages:
    """Return the stages of a constructed trainer whose data are ready; prompts that are too long are left out of them.

    Raises:
        ConfigError: an option does not fit the rewards, the model or the data.
        DataError: too few rows are within `max_prompt_length`.
    """
    args, clock, steps = host.args, StageClock(), StepMetrics(host)
    measurement = plan_measurement(trainer)
    check_data(trainer, measurement.columns, steps.count_prompt_too_long)
    sharing, has_images = plan_sharing(trainer), data_has_images(trainer)
    refuse_unfit_options(trainer, sharing.sharded, has_images)
    blank = plan_blank_image(trainer, has_images)
    passes = Passes(sharing, plan_vision(trainer, has_images), trainer.accelerator, blank)
    vllm_images = plan_vllm_images(trainer, has_images)
    forget_with_new_weights(trainer)
    choice = GroupChoice(host, measurement.wanted, _further_prompts(trainer, host))
    skipping = plan_skipping(trainer, measurement.wanted, sharing)
    live = LivePasses(skipping, host, choice.replay, passes, sharing.training)
    most = args.max_tokens_per_micro_batch
    budget = None if most is None else TokenBudget(most, host, live, sharing.training.reason_off is None)
    full = FullKL(trainer.model, trainer.ref_model, trainer.temperature) if args.needs_full_kl else None
    kl = KLControl(host, full)
    if full is not None or measurement.wanted.shift:
        passes.hidden = EmittedReader() if full is None else full.reader
    critic = Critic(host, trainer.model) if args.uses_critic else None
    if critic is not None and critic.reader is not None:
        passes.values = critic.reader
    return Stages(
        clock,
        measurement,
        sharing,
        skipping,
        passes,
        generation=Generation(trainer, host, measurement, passes, sharing.generation, vllm_images, clock),
        scoring=ScoringPasses(host, measurement, sharing, passes, live, budget, clock),
        judge=Judge(host, trainer, schedule, measurement, kl),
        kl=kl,
        critic=critic,
        choice=choice,
        live=live,
        budget=budget,
        loss=AddedLoss(host, kl, critic),
        steps=steps,
        recorder=RolloutRecorder(host, measurement, model_name(trainer.model)),
    )


def _further_prompts(trainer: ResumableTrainer, host: TRLHost) -> FurtherPrompts | None:
    args = host.args
    if args.dynamic_sampling != "resample":
        return None
    let_tables_hold(trainer._logs, int(args.generation_batch_size or 0) * (1 + args.dynamic_sampling_max_rounds))
    return FurtherPrompts(host, trainer.train_dataset, bool(trainer.shuffle_dataset))


def add_callbacks(trainer: ResumableTrainer, host: TRLHost, stages: Stages) -> CollapseWatch:
    """Let stages hear of the steps, evaluations and checkpoints of the trainer; return what watches for a collapse."""
    watch, recorder = CollapseWatch(host), stages.recorder
    trainer.add_callback(watch)
    trainer.add_callback(OptimizerClock(stages.clock))
    trainer.add_callback(FiniteUpdates(trainer.accelerator, stages.steps.count_update_left_out))
    name_for_trackers(trainer)
    outlive_trackers(trainer)
    if recorder.is_on:
        trainer.add_callback(FlushRecords(recorder))
    return watch


Result = TypeVar("Result")


class DAPOTrainer(ResumableTrainer):
    """TRL's `GRPOTrainer` with DAPO's defaults, signals of what the model looked at, and credit by them.

    Takes the arguments of `GRPOTrainer`; `args` is a `DAPOConfig`. With its own options at their defaults it trains as
    `GRPOTrainer` does with `loss_type="dapo"`, `epsilon_high=0.28` and `beta=0`. It overrides, and adds to:

    - `_generate_and_score_completions`: the stages perceive, choose and spread; records; images processed once.
    - `_tokenize_prompts`, `_generate_single_turn`: keep the prompts; prompts computed once; attention in generation.
    - `_calculate_rewards`: the measured pass, signals as columns, weights of this step, checks of what rewards return.
    - `_get_per_token_logps_and_entropies`: prompts computed once; signals; training passes over live tokens only.
    - `_compute_loss`: terms that are no advantages; metrics of the step; parts of few enough tokens.
    - `_get_dataloader`, `_prepare_inputs`: rows read once; those of a prompt and of one length in one micro-batch.
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
        args = checked_config(args, model, options)
        rewards, schedule = plan_rewards(reward_funcs, args, lambda: self.host.num_generations)
        self._rollouts: list[Rollout] = []  # the one at hand, behind those it is a further round of
        self._pass: TrainingPass | None = None
        with constructed_with_reference(args):
            super().__init__(model, rewards, args, *rest, **options)
        self.beta = args.beta
        make_ready(self, options.get("peft_config"))
        self.host = TRLHost(self, self._begin, self._judge)
        self.stages = stages = build_stages(self, self.host, schedule)
        self.sharing, self.skipping, self.resumed = stages.sharing, stages.skipping, stages.resumed(self)
        self.collapse_watch = add_callbacks(self, self.host, stages)
        self.idle_options = find_idle_options(self, stages.measurement, schedule.changes)
        announce(self, stages.sharing, stages.passes.vision, stages.skipping, self.idle_options)

    def _log_all(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _logged(self, outcome: tuple[Result, Mapping[str, float]]) -> Result:
        """Return what a stage has made, and log its metrics."""
        self._log_all(outcome[1])
        return outcome[0]

    # A rollout batch

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Add to the parent's: rows that the sampler repeats are read once."""
        dataset = ReadOnce(dataset) if reads_alike(dataset) else dataset
        return super()._get_dataloader(dataset, *args, **kwargs)

    @property
    def _rollout(self) -> Rollout | None:
        return self._rollouts[-1] if self._rollouts else None

    @contextmanager
    def _begin(self, rows: list[dict[str, Any]], **options: Any) -> Iterator[Rollout]:
        """In this block the hooks below fill a new rollout; one within another is a further round of it."""
        if not self._rollouts:
            self.stages.passes.vision.clear()
        self._rollouts.append(Rollout(with_image_lists(rows), **options))
        try:
            yield self._rollouts[-1]
        finally:
            self._rollouts.pop()

    def _judge(self, rollout: Rollout) -> Rollout:
        """TRL's generation and judgement of a rollout, and when training the pass over perturbed images."""
        once = images_processed_once(self.processing_class)
        with images_logged_by_all(self, rollout.rows), scored_by_reference(self), once:
            rollout.batch = super()._generate_and_score_completions(rollout.rows)
        if not self.model.training:
            return rollout
        if self.stages.critic is not None:
            self.stages.critic.judge(rollout)
        self.stages.kl.keep_reference(rollout)
        with self.stages.clock.stage("perceive"):
            return as_generated(perceive(rollout, self.host, self.stages.measurement), self.host)

    def _choose(self, rollout: Rollout) -> tuple[Rollout, Rollout]:
        """The rollout that is trained on, before and after its advantages are spread over tokens."""
        with self.stages.clock.stage("choose"):
            chosen = self._logged(self.stages.choice.choose(rollout))
            self._log_all(self.stages.kl.end_rollout())
            if self.stages.critic is not None:
                chosen = self._logged(self.stages.critic.estimate(chosen))
            return chosen, self._logged(spread(chosen, self.host))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Add to TRL's: when training, measure what depends on the image, choose groups, spread the advantages."""
        recorder = self.stages.recorder
        with self._begin(inputs, recorded=recorder.rows_due(len(inputs))) as rollout:
            rollout = self._judge(rollout)
            recorded = recorder.keep(rollout)
            if self.model.training:
                chosen, rollout = self._choose(rollout)
                add_credit(recorded, chosen, chosen.batch["advantages"], rollout.batch["advantages"])
            recorder.write(rollout, recorded)
            return with_perturbed_rows(rollout.batch)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Add to TRL's: keep the prompts; no file that they name is read; [] for a row without images among others."""
        refuse_files_in_prompts(prompts)
        if self._rollout is not None and self._rollout.messages is None:
            self._rollout.messages = prompts
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, None if images is None else [row_images or [] for row_images in images], fields

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add to TRL's: keep the prompts, compute each once, measure attention meanwhile; sampling of evaluations."""
        plain = super()._generate_single_turn
        prompts = Prompts(prompt_ids, images, multimodal_fields)
        return self.stages.generation.run(
            self._rollout, prompts, num_generations, lambda *batch: plain(*batch, *args, **kwargs)
        )

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Add to TRL's: measure completions, give rewards the signals, set this step's weights, check rewards."""
        judge, rollout = self.stages.judge, self._rollout
        with self.stages.clock.stage("reward", self.model.training):
            columns = self._logged(judge.prepare(rollout, completion_ids_list))
            # Read by rewards of our users' scripts, through the argument `trainer`.
            self._mdi_balance_scores_current_batch = columns.get("mdi_balance")
            rows = [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(inputs)]
            with replaced(self, "reward_funcs", judge.guarded(self.reward_funcs, rollout)):
                rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids_list)
            return self._logged(judge.check(rewards, self.reward_funcs, rollout, rows))

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add to TRL's: compute each prompt once; measure the policy's pass over a rollout; train what is live."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep, **kwargs}
        plain, passes = super()._get_per_token_logps_and_entropies, self.stages
        inputs = with_causal_completions(inputs, causal_model(model).config, logits_to_keep)
        if torch.is_grad_enabled():
            return passes.live.run(model, plain, inputs, batch_size, self._pass)
        return passes.scoring.run(model, plain, inputs, batch_size, self._rollout)

    # A micro-batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Add to TRL's: keep completions of a prompt, and rows of one length, together where that changes nothing.

        Pixels of a prompt are kept once until a micro-batch needs them, unless it comes back and has to remember more.
        """
        if (shuffle := self.stages.live.shuffle(self.sharing.regroups)) is None:
            return super()._prepare_inputs(generation_batch)
        join_pixels = grpo_trainer.unsplit_pixel_values_by_grid
        at_once = join_pixels if self.num_iterations > 1 else dict
        with (
            replaced(grpo_trainer, "shuffle_sequence_dict", shuffle),
            replaced(grpo_trainer, "unsplit_pixel_values_by_grid", at_once),
        ):
            return join_pixels(super()._prepare_inputs(generation_batch))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Add to TRL's: the terms that are no advantages; metrics of the step; parts of few enough tokens."""
        if self.stages.budget is None or not self.model.training:
            return self._loss_of_part(model, inputs)
        return self.stages.budget.loss(model, inputs, self._loss_of_part)

    def _loss_of_part(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._pass = passed = TrainingPass(inputs, model)
        try:
            loss = super()._compute_loss(model, inputs)
            if passed.logps is None or not self.model.training:
                return loss
            self._log_all(self.stages.steps.measure(passed, self._metrics["train"]))
            return self._logged(self.stages.loss.complete(loss, passed, self._get_per_token_logps_and_entropies))
        finally:
            self._pass = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to TRL's: rates, timings and reward weights, once per log of training; texts that tables can hold."""
        stages, training = self.stages, self.model.training
        if training and (seconds := sum(times := self._metrics["train"].get("step_time", []))):
            logs |= stages.steps.of_window(seconds) | stages.passes.metrics()
            logs |= stages.clock.metrics(self.accelerator, times)
        if training:
            stages.steps.merge(self._metrics["train"])
        evaluated = not training and self.is_world_process_zero()
        with in_texts(self._logs), beside_training(self.args.output_dir, self.state.global_step, evaluated):
            super().log(logs, start_time)
        if self.args.log_completions and self.is_world_process_zero():
            remove_oldest_tables(self.args.output_dir, self.args.rollout_log_max_megabytes * 1e6)
        stages.recorder.log(logs, "train" if training else "eval")

    def create_model_card(  # type: ignore[override]  # TRL's differs from its parent's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Add to TRL's: tags, rewards, the options that were on, and the papers to cite."""
        super().create_model_card(model_name, dataset_name, [*as_list(tags), *method_tags(self.args, rewards_of(self))])
        if self.is_world_process_zero():
            extend_card(self, model_name, dataset_name or self.data_source)
