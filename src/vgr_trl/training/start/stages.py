"""The stages of a run, built once, of a trainer that TRL has constructed."""

from dataclasses import dataclass

from vgr_trl.compat.round_logs import let_tables_hold
from vgr_trl.compat.vllm_encoder_cache import forget_with_new_weights
from vgr_trl.compat.vllm_images import plan_vllm_images
from vgr_trl.rewards.schedule import RewardSchedule
from vgr_trl.sharing import SharingPlan
from vgr_trl.signals import Measurement
from vgr_trl.skipping import SkippingPlan
from vgr_trl.training.checkpoints.order import PromptOrder
from vgr_trl.training.checkpoints.resumable import ResumableTrainer, Resumed
from vgr_trl.training.choice.choose import GroupChoice
from vgr_trl.training.choice.further_prompts import FurtherPrompts
from vgr_trl.training.critic.critic import Critic
from vgr_trl.training.finite_updates import FiniteUpdates
from vgr_trl.training.full_kl import FullKL
from vgr_trl.training.generation.generate import Generation
from vgr_trl.training.host import TRLHost
from vgr_trl.training.judge import Judge
from vgr_trl.training.kl import KLControl
from vgr_trl.training.loss import AddedLoss
from vgr_trl.training.metrics.clock import OptimizerClock, StageClock
from vgr_trl.training.metrics.collapse_watch import CollapseWatch
from vgr_trl.training.metrics.step_metrics import StepMetrics
from vgr_trl.training.metrics.trackers import name_for_trackers, outlive_trackers
from vgr_trl.training.passes.around import Passes
from vgr_trl.training.passes.budget import TokenBudget
from vgr_trl.training.passes.emitted import EmittedReader
from vgr_trl.training.passes.score import ScoringPasses
from vgr_trl.training.passes.skip import LivePasses
from vgr_trl.training.recording.record import FlushRecords, RolloutRecorder
from vgr_trl.training.start.measurable import plan_measurement
from vgr_trl.training.start.plans import plan_blank_image, plan_sharing, plan_skipping, plan_vision
from vgr_trl.training.start.prepare import check_data, data_has_images, model_name
from vgr_trl.training.start.refusals import refuse_unfit_options


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
