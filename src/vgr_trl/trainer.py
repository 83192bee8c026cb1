"""`DAPOTrainer`: TRL's `GRPOTrainer` with the stages of this library between its generation and its loss."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from vgr_trl.batch.inputs import Prompts, with_perturbed_rows
from vgr_trl.compat.completion_tables import beside_training, in_texts, remove_oldest_tables
from vgr_trl.compat.logged_images import images_logged_by_all
from vgr_trl.compat.token_types import with_causal_completions
from vgr_trl.config import DAPOConfig
from vgr_trl.data.rows.repeated import ReadOnce, reads_alike
from vgr_trl.reporting.views.card.model_card import TAGS, TRL_PAPER, method_tags
from vgr_trl.sharing import replaced
from vgr_trl.sharing.backbone import causal_model
from vgr_trl.skipping import images_processed_once
from vgr_trl.training.checkpoints.resumable import ResumableTrainer
from vgr_trl.training.generation.noisy import as_generated
from vgr_trl.training.host import TRLHost
from vgr_trl.training.kl import constructed_with_reference, scored_by_reference
from vgr_trl.training.perceive import perceive
from vgr_trl.training.recording.card import extend_card, rewards_of
from vgr_trl.training.recording.taking import add_credit
from vgr_trl.training.rollout import Rollout, TrainingPass
from vgr_trl.training.spread import spread
from vgr_trl.training.start.prepare import (
    announce,
    as_list,
    checked_config,
    find_idle_options,
    make_ready,
    plan_rewards,
    with_image_lists,
)
from vgr_trl.training.start.ready_data import refuse_files_in_prompts
from vgr_trl.training.start.seams import check_seams
from vgr_trl.training.start.stages import add_callbacks, build_stages

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
