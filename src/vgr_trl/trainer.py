"""`DAPOTrainer`: TRL's `GRPOTrainer` with DAPO's defaults, signals of visual attention, and credit by the signals."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from vgr_trl.batch import Batch, Prompts, pad_rows, per_token
from vgr_trl.batching import ContinuousBatching
from vgr_trl.callbacks.stopping import FiniteUpdates, SaveOnTermination
from vgr_trl.callbacks.trackers import evaluation_prefix, guard_trackers, print_lines
from vgr_trl.checkpoints import MovingReference, ResumableTrainer
from vgr_trl.config import why_no_engine
from vgr_trl.critic import Critic
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.checked_rows import ReadOnce, drop_long_prompts, is_repeatable, pop_replaced
from vgr_trl.data.prompts import PromptLengths
from vgr_trl.errors import ConfigError, RewardError, check_release
from vgr_trl.generation import (
    TURN_COLUMNS,
    blind_answers,
    collect_turns,
    count_turns,
    eval_sampling,
    generate,
    guarded,
)
from vgr_trl.loss.kl import FullKL, KLControl
from vgr_trl.loss.terms import LossPass, TermInputs, auxiliary_loss, average_as_loss
from vgr_trl.measure import (
    apply_token_credit,
    completion_batch,
    keep_returned_weights,
    make_signals,
    measure_sample,
    pad_signals,
    signals_as_columns,
    wanted_scores,
)
from vgr_trl.metrics.collapse import CollapseWatch
from vgr_trl.metrics.step_metrics import StageClock, StepMetrics
from vgr_trl.passes.micro_batches import join_micro_batches, loss_in_parts
from vgr_trl.passes.run_pass import adapter_dtype, cast_adapters, find_loss_mask, run_pass, score
from vgr_trl.patches.trl import (
    enable_reference_model,
    enlarge_tables,
    flatten_conversations,
    forget_fused_head,
    images_logged_by_all,
    keep_pixel_rows_whole,
    keep_prompts_unpadded,
    keep_training_table,
    let_models_with_processors_batch,
    mark_images,
    mark_turn,
    override_sampling,
    process_with_options,
    remove_oldest_tables,
    shuffle_by,
    unlogged,
    warn_of_lost_table,
)
from vgr_trl.patches.vllm import (
    answers_of_server,
    forget_with_new_weights,
    name_weights_as_saved,
    naming_unserved_model,
    plan_unexpanded_prompts,
)
from vgr_trl.patching import keep_random_state, patched_attribute, patched_attributes
from vgr_trl.prepare import change_data, check_rewards, prepare_trainer, refuse_few_rows
from vgr_trl.processes import initialise_loader
from vgr_trl.registries import loss_terms
from vgr_trl.reporting.markdown import TAGS, TRL_PAPER, extend_card, method_tags, user_rewards
from vgr_trl.reporting.recorder import RolloutRecorder
from vgr_trl.rewards.answers import ANSWER_TAGS, completion_text, decode_with_tags
from vgr_trl.rewards.calling import LATE_REWARD, RewardCalls, is_from, wrap_reward
from vgr_trl.rewards.loading import collect_token_weights
from vgr_trl.rollout import (
    Rollout,
    normalise_image_columns,
    refuse_files_in_prompts,
    refuse_infinite,
    weighted_sums,
)
from vgr_trl.rollout_checks import EngineCheck, check_pixel_use
from vgr_trl.run import Measurement, Run, RunFacts, has_own_loss, iterate_datasets, read_facts
from vgr_trl.sampling.replay import Replay
from vgr_trl.sampling.zero_variance import FurtherPrompts, GroupSelector, ZeroVarianceStreak
from vgr_trl.sharing.attention import prepare_mixers
from vgr_trl.sharing.model_support import SharingReport, base_of, causal_model
from vgr_trl.signals.named import SINGLE_COLUMNS
from vgr_trl.signals.scoring import Purpose, Scores, Want, policy_is_active
from vgr_trl.trl_bridge import (
    OLD_LOGPS,
    from_scoring,
    from_trl,
    perturbed_by_row,
    shuffle_whole_groups,
    to_scoring,
    to_trl,
)
from vgr_trl.validate.features import announce, plan_dummy_image, plan_features, plan_measurement, plan_vision
from vgr_trl.validate.options import find_idle_options, plan_rewards, refuse_unfit_options, validate_config
from vgr_trl.views.perturbed_pass import degrade_rows, record_noise, score_perturbed, score_perturbed_part
from vgr_trl.vision import images_processed_once, join_windows

logger = logging.get_logger(__name__)


class DAPOTrainer(ResumableTrainer, GRPOTrainer):
    """TRL's `GRPOTrainer` with DAPO's defaults, signals of visual attention, and credit by the signals.

    Takes the arguments of `GRPOTrainer`; `args` is a `DAPOConfig`. With its own options at their defaults it trains as
    `GRPOTrainer` does with `loss_type="dapo"`, `epsilon_high=0.28` and `beta=0`. It overrides these methods, and calls
    TRL's in each:

    - `_get_dataloader`, `_prepare_inputs`: read each row once; keep the rows of a prompt in one micro-batch.
    - `_tokenize_prompts`, `_get_tool_suffix_ids`, `_generate_single_turn`: refuse prompts that name files; give vLLM
      unexpanded images; share prompts; measure attention.
    - `_generate`: keep the prompts, and the turns of completions that call tools.
    - `_calculate_rewards`: run the scoring pass, pass signals to rewards as columns, check returned rewards.
    - `_generate_and_score_completions`: score perturbed views, select groups, apply token credit, record.
    - `_get_per_token_logps_and_entropies`: run the pass of the stated purpose.
    - `_compute_loss`: add loss terms; measure the step; cut micro-batches into passes.
    - `log`, `create_model_card`: log metrics, tables and records; write the model card.
    - by `ResumableTrainer`, `train`, `_get_train_sampler`, `_save_checkpoint`, `_save_rng_state`,
      `_load_optimizer_and_scheduler`, `_load_from_checkpoint`, `_load_best_model`: save complete checkpoints, and
      continue from them to the same bits.

    Example:
        >>> model, processor = build_tiny_vlm([])  # from vgr_trl.demo.tiny_model
        >>> questions = to_dataset(draw_questions(8, seed=0, split="train"))  # from vgr_trl.demo.demo
        >>> args = DAPOConfig("run", max_steps=1, max_completion_length=4, use_cpu=True, bf16=False, report_to="none")
        >>> trainer = DAPOTrainer(model, ["accuracy", "vgr"], args, questions, processing_class=processor)
        >>> trainer.train().global_step
        1

    Attributes:
        run: options, model, facts and plans, which all stages read.
        replay, further_prompts, critic: None where they are off.
        kl: the KL to the reference, and the coefficient that follows it.
        loss_terms: name of a loss term that is on -> its function.
        termination: callback that saves a checkpoint after SIGTERM; `stopped` says whether it has.
        idle_options: name of an option that is not at its default -> why it has no effect.

    Raises:
        UnsupportedTRLError: this library is not tested with the installed TRL.
        ConfigError: an option does not fit the reward functions, the model or the data.
        DataError: no row is within `max_prompt_length`, or fewer than a rollout takes.
    """

    _tag_names = GRPOTrainer._tag_names + list(TAGS)
    _name = "DAPO"
    _paper = TRL_PAPER
    data_source: str | None = None  # source of the data, for the model card
    num_generations: int
    num_generations_eval: int
    pad_to_multiple_of: int | None
    _logs: dict[str, Any]
    further_prompts: Any = None
    _rollout: Rollout | None = None  # the current one; rollouts may be nested
    _compares_engine = False  # whether the next training pass is compared with the engine that gave its old ones
    _balances: list[float | None] | None = None  # MDI balances of the completions that are being rewarded

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: DAPOConfig | None = None, *rest: Any, **options: Any
    ) -> None:
        """Check release and options before TRL loads a model; check the data once its processor is known."""
        check_release()
        args = validate_config(args, model, options)
        rewards, self.reward_schedule = plan_rewards(reward_funcs, args, lambda: self.run.completions_per_prompt)
        self._loss_pass: LossPass | None = None  # set while TRL computes the loss of a training pass
        self._until_backward: ExitStack | None = None  # closed when the backward pass of a micro-batch has run
        weights = args.reward_weights and args.reward_weights + [1.0] * args.penalises_kl
        weights_with_penalty = patched_attribute(args, "reward_weights", weights)
        if isinstance(model, nn.Module):
            forget_fused_head(model)
        batching = let_models_with_processors_batch(self, args)
        with enable_reference_model(args, args, teaches=True), weights_with_penalty, naming_unserved_model(), batching:
            super().__init__(model, rewards, args, *rest, **options)
        self.beta = args.beta
        self._video_pad_token_id = None  # with tools TRL 1.16 would mark it as a video, and no row has one
        keep_prompts_unpadded(self)
        template: dict[str, Any] = {"tools": self.tools or None, "chat_template": self.chat_template}
        template |= cast("dict[str, Any]", self.chat_template_kwargs)
        prepare_trainer(self, options.get("peft_config"), template)
        facts = read_facts(self)
        self.step_metrics = StepMetrics(args, self.accelerator)
        measurement = plan_measurement(facts)
        self._check_data(facts, measurement, template)
        self.run = self._plan_run(facts, measurement)
        self._add_engine()
        self._add_state()
        self._add_callbacks()
        self.idle_options = find_idle_options(self.run, self.reward_schedule.changes, self.eval_dataset is not None)
        announce(self.run, self.rows_per_pass, self.idle_options)

    def _check_data(self, facts: RunFacts, measurement: Measurement, template: dict[str, Any]) -> None:
        """Refuse rewards and data that cannot be trained with; drop prompts over `max_prompt_length`."""
        if facts.completion_maker in (None, "tools"):  # environments add columns later
            columns = [*measurement.columns, *(TURN_COLUMNS if self.tools else ())]
            datasets = (data for _, data in iterate_datasets(self.train_dataset, self.eval_dataset))
            check_rewards(self.reward_funcs, datasets, columns)
        if (limit := self.args.max_prompt_length) is not None:
            lengths, count = PromptLengths(self.processing_class, **template), self.step_metrics.count_too_long
            change = partial(drop_long_prompts, lengths=lengths, limit=limit, on_dropped=count)
            self.train_dataset, self.eval_dataset = change_data(self.train_dataset, self.eval_dataset, change)
        refuse_few_rows(self.train_dataset, self.args.prompts_per_rollout)

    def _plan_run(self, facts: RunFacts, measurement: Measurement) -> Run:
        """Plan prompt sharing, skipping and vision caching; join micro-batches."""
        refuse_unfit_options(facts, measurement.perturbations)
        dummy_image = plan_dummy_image(facts, self.accelerator)
        features = plan_features(facts, measurement.needed, dummy_image)
        self.args, self.rows_per_pass = join_micro_batches(self.args, features, self.accelerator)
        self._train_batch_size = self.args.train_batch_size
        for model in () if self.args.torch_compile else filter(None, (self.model, self.ref_model)):
            join_windows(model)
        if features.share_training.enabled or features.share_scoring.enabled:
            prepare_mixers(base_of(causal_model(self.model)))
        plain_pass: Any = super()._get_per_token_logps_and_entropies
        return Run(
            args=self.args,
            accelerator=self.accelerator,
            processor=self.processing_class,
            tokenizer=self._tokenizer,
            reference=self.ref_model,
            facts=facts,
            measurement=measurement,
            features=features,
            clock=StageClock(),
            vision_cache=plan_vision(facts),
            dummy_image=dummy_image,
            sharing=SharingReport(),
            rows_per_chunk=self.rows_per_pass.original,
            pad_to_multiple_of=self.pad_to_multiple_of or None,
            end_tokens=frozenset({*self.eos_token_ids, self._tokenizer.pad_token_id}),
            tokenize=self._tokenize_views,
            to_device=self._prepare_input,
            plain_pass=lambda model, batch, **wanted: plain_pass(model, **to_scoring(batch), **wanted),
            get_model=lambda: self.model,
            get_state=lambda: self.state,
        )

    def _add_engine(self) -> None:
        """Plan the check of pixels, and prepare vLLM or continuous batching."""
        run, facts = self.run, self.run.facts
        shows_images = facts.completion_maker != "rollout_func" and run.args.degraded_by != "mask_image"
        self.pixels_unchecked = run.args.check_pixels and facts.is_vlm and facts.has_images and shows_images
        self.batching = self.unexpanded = None
        if self.use_transformers_continuous_batching and facts.is_vlm:
            self.batching = ContinuousBatching(run, self.generation_config, self.continuous_batching_config)
        if self.use_vllm and facts.is_vlm:
            self.unexpanded = plan_unexpanded_prompts(self.vllm_generation, self.processing_class)
            name_weights_as_saved(self.vllm_generation, self.model)
            forget_with_new_weights(self.vllm_generation)
        limit = run.args.engine_distance_limit if why_no_engine(run.args) is None else None
        self.engine_check = EngineCheck(limit) if limit else None
        # TRL does not ask transformers' `generate` for log-probabilities.
        generates = not (self.use_vllm or run.args.use_transformers_continuous_batching)
        self.keeps_logps = generates and bool(run.args.cache_implementation) and self.engine_check is not None

    def _add_state(self) -> None:
        """Create the state that checkpoints save."""
        args, run = self.args, self.run
        wrap = partial(wrap_reward, trainer=self, seconds=args.reward_timeout)
        num_tasks = len(self.reward_schedule.regular)
        self.reward_calls = RewardCalls(lambda: self.reward_funcs, self.reward_func_names, num_tasks, wrap)
        self.zero_variance_streak = ZeroVarianceStreak(args)
        self.replay = Replay(run) if args.replay_buffer_size > 0 else None
        if args.dynamic_sampling == "resample":
            enlarge_tables(self._logs, int(args.generation_batch_size or 0) * (1 + args.dynamic_sampling_max_rounds))
            self.further_prompts = FurtherPrompts(self.train_dataset, args.seed, self.shuffle_dataset)
        full = FullKL(self.model, self.ref_model, self.temperature) if args.needs_full_kl else None
        self.kl = KLControl(args, self.accelerator, full)
        self.critic = Critic(run) if args.uses_critic else None
        self.loss_terms = {name: loss_terms.load(name) for name in args.terms}
        adaptive = self.kl if self.kl.is_adaptive else None
        moving = MovingReference(self.accelerator.unwrap_model(self.ref_model)) if args.sync_ref_model else None
        parts = (
            self.replay,
            self.further_prompts,
            adaptive,
            self.critic,
            self.zero_variance_streak,
            moving,
            self.engine_check,
        )
        self.resumed = [part for part in parts if part is not None]
        self.selector = GroupSelector(
            run,
            self.replay,
            self.further_prompts,
            generate=self.generate_further,
            greedy_rewards=self.greedy_rewards,
            metrics=self._metrics["train"],
            table=self._logs,
            reward_names=self.reward_func_names,
        )

    def _add_callbacks(self) -> None:
        self.collapse_watch = CollapseWatch(self._metrics["train"], self.named_reward_weights)
        self.recorder = RolloutRecorder(self.run, self.reward_func_names)
        self.termination = SaveOnTermination(self.accelerator)
        for callback in (self.collapse_watch, self.termination, self.run.clock):
            self.add_callback(callback)
        if self.accelerator.mixed_precision != "fp16":
            self.add_callback(FiniteUpdates(self.accelerator, self.step_metrics))
        guard_trackers(self.callback_handler.callbacks, self.args.metric_names, self.accelerator.num_processes)
        print_lines(self.callback_handler.callbacks)

    @property
    def mode(self) -> str:
        """Return `train` or `eval`, as TRL names its metrics."""
        return "train" if self.model.training else "eval"

    def named_reward_weights(self) -> dict[str, float]:
        """Return the weight of each reward in this step."""
        return dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))

    def newest_metrics(self) -> dict[str, float]:
        """Return the last value of each metric that will be logged in this mode."""
        return {name: values[-1] for name, values in self._metrics[self.mode].items() if values}

    @property
    def _mdi_balance_scores_current_batch(self) -> list[float | None]:
        """Return the MDI balance of each completion of the batch, for rewards that read it off the trainer.

        Raises:
            RewardError: the attention of these completions is not measured.
        """
        if self._balances is None:
            raise RewardError("Attention is not measured, so there is no balance: set compute_attention_metrics=true.")
        return self._balances

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self.mode][name].append(value)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Read repeated rows once, and end workers with this process."""
        if is_repeatable(dataset):
            dataset = ReadOnce(dataset, kwargs.get("description", "training").lower())
        loader: Any = super()._get_dataloader(dataset, *args, **kwargs)
        loads = loader.base_dataloader  # PyTorch's, which accelerate wraps
        loads.worker_init_fn = partial(initialise_loader, loads.worker_init_fn)
        return loader

    # A step, in its order

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does.

        Raises:
            ConfigError: a method of the loss was replaced after micro-batches were joined.
        """
        joins = self.rows_per_pass.joined > 1 and self.args.most_rows_per_pass is None
        if joins and has_own_loss(vars(self), type(self)):
            raise ConfigError("The loss was replaced after joining micro-batches: give rows_per_pass off or a number.")
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Time the step without its stages, and measure the memory of an update."""
        with self.run.clock.stage("update"), ExitStack() as self._until_backward:
            loss = super().training_step(*args, **kwargs)
        if self.rows_per_pass.memory is not None and self.accelerator.sync_gradients:
            self.rows_per_pass.memory.end_update()
        return loss

    @keep_pixel_rows_whole()
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Group completions of a prompt, and rows of one length, in micro-batches where the update stays the same.

        Pixels of a prompt are stored once until a micro-batch needs them, unless several iterations do.
        """
        if not self.run.features.regroup.enabled:
            return super()._prepare_inputs(generation_batch)
        config = causal_model(self.model).config if self.tools else None
        with shuffle_by(partial(shuffle_whole_groups, config=config), joins_pixels=self.num_iterations > 1):
            inputs = super()._prepare_inputs(generation_batch)
        return grpo_trainer.unsplit_pixel_values_by_grid(inputs)

    def _tokenize_views(self, prompts: list[Any]) -> Prompts:
        """Tokenize prompts with other images, of which TRL expects as many as rows if there are environments."""
        names = vars(self).get("_batch_environments", [])[:1] * len(prompts)
        with patched_attribute(self, "_batch_environments", names):
            return Prompts(*GRPOTrainer._tokenize_prompts(self, prompts))

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Refuse prompts that name files, and return [] for rows without images in a batch with images."""
        refuse_files_in_prompts(prompts)
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if self.unexpanded is not None:
            prompt_ids = [[*map(int, ids)] for ids in prompt_ids]  # the processor of Mistral 3 returns tensors
            self.unexpanded.texts.clear()
            if images is not None:
                with self.unexpanded.as_text(self):
                    texts = super()._tokenize_prompts(prompts)[0]
                self.unexpanded.texts |= zip(map(tuple, prompt_ids), texts, strict=True)
        return prompt_ids, None if images is None else [row_images or [] for row_images in images], fields

    def _get_tool_suffix_ids(self, tool_messages: list[Any]) -> Any:
        """Keep the tokens of the messages' text, which vLLM reads."""
        ids = super()._get_tool_suffix_ids(tool_messages)
        if self.unexpanded is not None:
            with self.unexpanded.as_text(self):
                self.unexpanded.texts[tuple(ids)] = super()._get_tool_suffix_ids(tool_messages)
        return ids

    def _generate(self, prompts: list[Any]) -> Any:
        """Keep the prompts, and with tools the turns: the policy's own tokens, and returned images.

        Completions keep special tokens that are tags of a prompt, or of this library's rewards.
        """
        if self._rollout is not None:
            self._rollout.messages = prompts
        rewards = () if self._rollout is None else self.reward_funcs
        text = str(prompts) + ANSWER_TAGS * any(is_from(reward, "vgr_trl") for reward in rewards)
        decode = partial(decode_with_tags, self._tokenizer, text=text)
        keeps_tags = patched_attribute(self.processing_class, "batch_decode", lambda ids, **_: decode(ids))
        with keeps_tags, self._guard_tools() if self.tools else nullcontext():
            generated = super()._generate(prompts)
        if self._rollout is not None:
            self._rollout.engine_logps = generated[4]
        if self._rollout is not None and self.tools:
            self._rollout.turns = collect_turns(self.run, self._rollout, generated, self._image_pad_token_id)
        return generated

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Share prompts during generation and measure attention; sample with the options of the mode."""
        if kwargs.pop("has_tool_images", False):
            multimodal_fields = mark_turn(self.model, prompt_ids, multimodal_fields)
        plain = super()._generate_single_turn

        def sample(ids: Any, images: Any, fields: Any, num_generations: int) -> Any:
            if self.batching is None:
                return plain(ids, images, fields, num_generations, *args, **kwargs)
            return self.batching.generate(
                self.model_wrapped, self.generation_config, self.generation_kwargs, ids, fields
            )

        is_server = self.use_vllm and self.args.vllm_mode == "server"
        prompts, rollout = Prompts(prompt_ids, images, multimodal_fields), self._rollout
        before = None if rollout is None else rollout.noise
        with (
            override_sampling(self, eval_sampling(self.args, self.model.training)),
            answers_of_server(self.vllm_generation, self.state.global_step + 1) if is_server else nullcontext(),
        ):
            generated = generate(
                self.run,
                rollout,
                prompts,
                num_generations,
                sample,
                checks_images=self.pixels_unchecked,
                keeps_logps=self.keeps_logps and self.model.training,
            )
        if rollout is not None and rollout.noise is not before and rollout.noise is not None:
            self._log_completion_extra("noisy", rollout.noise.rows)
        return generated

    @contextmanager
    def _guard_tools(self) -> Iterator[None]:
        """Guard the run in this block against malformed tool calls and results."""
        names = "_sync_tool_dicts", "_async_tool_dicts"
        dicts = [vars(self)[name] for name in names]
        with (
            guarded(self.processing_class, self._is_vlm, dicts) as tools,
            patched_attributes(self, **dict(zip(names, tools, strict=True))),
        ):
            yield

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Score completions, pass signals to rewards as columns, and check returned rewards."""
        rollout = self._rollout
        with self.run.clock.stage("reward", self.model.training):
            columns = {} if rollout is None else self._columns_for_rewards(rollout, completion_ids_list)
            if rollout is not None and rollout.turns is not None:
                counts = count_turns(completions, rollout.turns)
                self._show_columns(counts)
                columns |= counts
            self._balances = columns.get("mdi_balance")
            rows = [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(inputs)]
            wrapped = self.reward_calls.wrapped(alone=rollout is not None and rollout.greedy)
            with patched_attribute(self, "reward_funcs", wrapped):
                rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids_list)
            rewards = self.kl.drop_unscored_penalties(rewards)
            refuse_infinite(rewards, self.reward_func_names, rows, len(rows) * self.accelerator.process_index)
            self._log_metrics(self.reward_calls.count_undefined(rewards))
            if self.model.training:
                self.reward_calls.warn_of_constants(rewards, completions[0], rows[0])
            if self.reward_schedule.changes:  # comparable over the change of weights, unlike `reward`
                late = self._weights_with(self.reward_schedule.regular)
                self._log_metrics({LATE_REWARD: weighted_sums(rewards, late).nanmean().item()})
            if rollout is not None:
                rollout.rewards = rewards  # unweighted, (N of all, F)
                rollout.token_weights = collect_token_weights(self.reward_funcs)
            return rewards

    def _columns_for_rewards(self, rollout: Rollout, completion_ids: list[list[int]]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        run, measurement = self.run, self.run.measurement
        if "blind" in measurement.needed:
            columns, metrics = blind_answers(run, rollout, completion_ids, self.answer)
            self._log_metrics(metrics)
            self._show_columns(columns)
        if not measurement.scoring:
            return columns
        if rollout.signals is None and measurement.samples and self.model.training:
            if not rollout.greedy:
                shown, metrics = measure_sample(run, rollout, completion_ids)
                self._show_columns(shown)
                self._log_metrics(metrics)
            return columns
        if rollout.signals is None:
            batch = completion_batch(run, rollout, completion_ids)
            reads_pass = self.args.penalises_kl or measurement.needs("values", "similarity", "shift")
            generated = None if reads_pass else rollout.generated
            if generated is not None and rollout.recorded is None:
                rollout.signals = pad_signals(generated, batch.completion_mask.bool())
            else:
                with nullcontext() if generated is None else keep_random_state(self.accelerator.device):
                    self._score_rollout(rollout, batch)
        measured, metrics = signals_as_columns(run, rollout)
        if "vgr" in measured:
            self._show_columns({name: measured[name] for name in SINGLE_COLUMNS})
        self._log_metrics(metrics)
        # Without readers, attention is for metrics: rewards get as little of it in evaluation as in training.
        return {**columns, **({} if measurement.samples else measured), **self.kl.penalise(rollout)}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Select groups and apply token credit when training, and record the rollout."""
        self.step_metrics.rows_replaced += pop_replaced(inputs) * self.model.training
        recorded_rows = self.recorder.rows_due(len(inputs))
        with self.new_rollout(inputs, recorded=recorded_rows) as rollout, self._weights_of_mode():
            self.generate_and_score(rollout)
            recorded = self.recorder.snapshot(rollout, self.reward_weights)
            if self.model.training:
                with self.run.clock.stage("selection"):
                    self._log_metrics(self.selector.select(rollout, self.reward_weights))
                    if self.args.penalises_kl:
                        self._log_metrics(self.kl.update())
                    if self.critic is not None:
                        self._log_metrics(self.critic.estimate(rollout))
                    advantages = cast("Tensor", rollout.batch.advantages)  # (N,), with a critic (N, T)
                    self._log_metrics(rollout.metrics)
                    if self.args.shapes_advantages:
                        self._log_metrics(apply_token_credit(self.run, rollout))
                    self.zero_variance_streak.warn(self.run, rollout)
                self.recorder.add_credit(recorded, rollout, advantages, cast("Tensor", rollout.batch.advantages))
            self.recorder.write(rollout, recorded, self.reward_weights, self.newest_metrics())
            return to_trl(rollout.batch) | perturbed_by_row(rollout.batch)

    def generate_and_score(self, rollout: Rollout) -> None:
        """Generate, score and reward a rollout by TRL's method; when training, degrade images and score other views."""
        rollout.rows = degrade_rows(self.run, rollout)
        once = images_processed_once(self.processing_class)
        reference = enable_reference_model(self, self.args) if self.model.training else nullcontext()
        options = process_with_options(self.processing_class) if self.tools and self._is_vlm else nullcontext()
        with images_logged_by_all(self, rollout.rows), reference, options, once:
            batch = from_trl(super()._generate_and_score_completions(rollout.rows))
        if rollout.turns is not None and rollout.turns.fields:
            batch = mark_images(self.model, batch)
        rollout.batch = batch
        if not self.model.training:
            return
        if self.batching is not None and rollout.engine_logps and (old := batch.old_logps) is not None:
            self._log_metrics(self.batching.compare(batch, old, torch.ones_like(old, dtype=torch.bool)))
        if self.pixels_unchecked and (metrics := check_pixel_use(self.run, rollout)) is not None:
            self.pixels_unchecked = False
            self._log_metrics(metrics)
        if self.engine_check is not None:
            self._log_metrics(self.engine_check.check(self.run, rollout))
        if self.critic is not None:
            self.critic.value_tokens(rollout, self.reward_weights)
        self.kl.keep_reference(rollout)
        with self.run.clock.stage("perturbed"):
            record_noise(self.run, rollout, self.reward_weights)
            score_perturbed(self.run, rollout)
        keep_returned_weights(rollout, self.args.token_weights)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Score the rollout, run the training pass of a loss, or score for TRL's loss of an evaluation."""
        to_score = from_scoring(input_ids, attention_mask, logits_to_keep, kwargs)
        entropies, router_loss = (bool(kwargs.get(f"compute_{name}")) for name in ("entropy", "aux_loss"))
        of_loss = self._loss_pass
        if of_loss is None and self._rollout is not None:
            scores = self._score_for_rollout(self._rollout, model, to_score, entropies)
            return (None, None, None) if scores is None else (scores.logps, scores.entropies, None)
        if of_loss is None or of_loss.inputs is not None:  # a subclass's loss makes further passes
            purpose = Purpose.EVALUATION if of_loss is None else Purpose.TRAINING
            want = Want(entropies, router_loss=router_loss)
            scores = run_pass(self.run, model, to_score, want, purpose=purpose, gradients=torch.is_grad_enabled())
            return scores.logps, scores.entropies, scores.router_loss
        batch = of_loss.batch
        to_score = replace(to_score, by_policy=batch.by_policy)
        want = Want(
            entropies,
            hidden=(self.kl.in_loss and self.kl.full is not None) or "hidden" in self.run.measurement.term_needs,
            values=None if self.critic is None else self.critic.head,
            router_loss=router_loss,
            tokens=find_loss_mask(self.run.features, batch),
        )
        scores = run_pass(self.run, model, to_score, want, purpose=Purpose.TRAINING, gradients=torch.is_grad_enabled())
        logps, old = scores.logps, batch.old_logps
        if old is not None:  # constants for tokens without loss, at a ratio of 1
            logps = torch.where(scores.mask, logps, old.to(logps))
        of_loss.scores, of_loss.inputs = scores, self._term_inputs(model, batch, scores, logps)
        return logps, scores.entropies, scores.router_loss

    def _term_inputs(self, model: nn.Module, batch: Batch, scores: Scores, logps: Tensor) -> TermInputs:
        """Build the inputs of loss terms from a micro-batch and its training pass."""
        columns = batch.columns
        top = [columns[name].transpose(1, 2) for name in ("teacher_top_ids", "teacher_top_logps") if name in columns]
        return TermInputs(
            logps,
            batch.valid,
            per_token(cast("Tensor", batch.advantages)).expand_as(logps),
            old_logps=batch.old_logps,
            reference_logps=columns.get("reference_logps"),
            hidden=scores.hidden,
            teacher_logps=columns.get("teacher_logps"),
            teacher_top=(top[0], top[1]) if top else None,
            model=model,
            temperature=self.temperature,
        )

    def _score_for_rollout(self, rollout: Rollout, model: nn.Module, batch: Batch, entropies: bool) -> Scores | None:
        """Score a rollout by the policy or its reference; return None if the first training pass will score it."""
        if rollout.turns is not None and rollout.turns.fields:
            batch = mark_images(model, batch)
        if model is self.ref_model or not policy_is_active(model):
            want = Want(entropies, hidden=self.kl.full is not None)
            rollout.reference = scores = score(self.run, batch, want, model, purpose=Purpose.REFERENCE)
            return scores
        if self.model.training and self.run.features.reuse_first_pass.enabled:
            return None
        if self.batching is not None and self.model.training and not (entropies or self.run.measurement.scoring):
            mask = batch.completion_mask.bool()
            if (logps := self.batching.old_logps(rollout, mask)) is not None:
                self._compares_engine = rollout.noise is None and self.replay is None
                return Scores(logps, mask)
        if model is not self.model or not self.run.measurement.scoring:
            return score(self.run, batch, Want(entropies), model)
        if rollout.turns is not None:
            is_own, _ = pad_rows(rollout.turns.by_policy, 1, "right", self.pad_to_multiple_of)
            batch = replace(batch, by_policy=is_own.to(batch.completion_ids.device))
        return self._score_rollout(rollout, batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Cut micro-batches into passes, add further loss terms, and measure the step."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if self._until_backward is not None:
            self._until_backward.enter_context(cast_adapters(model, adapter_dtype(self.accelerator)))
        batch = from_trl(inputs)
        loss = loss_in_parts(self.run, self.rows_per_pass, model, batch, self._loss_of_part)
        if batch.old_logps is not None:  # for later iterations
            inputs.setdefault(OLD_LOGPS, batch.old_logps)
        return loss

    def _loss_of_part(self, model: Any, batch: Batch, weight: float = 1.0) -> Any:
        """Return the weighted loss of a part of a micro-batch; keep its log-probabilities for later iterations."""
        of_loss = LossPass(batch)
        with patched_attribute(self, "_loss_pass", of_loss):
            loss = super()._compute_loss(model, to_trl(batch))
        inputs, scores = of_loss.inputs, of_loss.scores
        if inputs is None or scores is None:  # a subclass has made the pass itself
            return loss * weight
        measure = self.step_metrics.measure
        self._log_metrics(measure(batch, inputs.logps, self._metrics["train"], scores.mask, scores.rows_run))
        if "engine_logps" in batch.columns and self.batching is not None:
            if self._compares_engine or batch.old_logps is None:
                distances = self.batching.compare(batch, inputs.logps, scores.mask)
                self._log_metrics(distances)
                if self._compares_engine and self.engine_check is not None:
                    mean = distances["sampling/sampling_logp_difference/mean"]
                    self._log_metrics(self.engine_check.judge(mean, self.state.global_step + 1))
            self._compares_engine = False
        steps, processes = self.current_gradient_accumulation_steps, self.accelerator.num_processes
        if "perturbed" in self.run.measurement.term_needs:
            perturbed = score_perturbed_part(self.run, model, batch, scores.mask)
            inputs = replace(inputs, perturbed_logps=perturbed.logps)
            if perturbed.entropies is not None:
                inputs.log("perturbed_entropy", perturbed.entropies)
        kl = None
        if self.kl.in_loss:
            kl, metrics = self.kl.term(inputs, batch.columns.get("reference_hidden"))
            self._log_metrics(metrics)
        if (terms := auxiliary_loss(inputs, self.loss_terms, self.args, kl)) is not None:
            loss = loss + average_as_loss(terms, inputs.loss_mask, batch.num_items, self.args, steps, processes)
            self._log_metrics(inputs.totals.metrics(self.accelerator.gather))
        loss = loss * weight
        if self.critic is not None:
            self._log_metrics(self.critic.learn(batch, scores.values, weight, steps))
            loss = loss * (self.state.global_step >= self.args.critic_warmup)  # before it the policy stands still
        if self.run.features.reuse_first_pass.enabled and batch.old_logps is None:
            batch.old_logps = inputs.logps.detach()
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log rates, timings and reward weights with TRL's metrics, and conversations as text."""
        training = self.model.training
        if training and (seconds := sum(times := self._metrics["train"].get("step_time", []))):
            logs |= self.step_metrics.summarise_window(seconds, self.named_reward_weights())
            logs |= self.run.sharing.metrics() | self.run.vision_cache.metrics()
            logs |= self.run.clock.metrics(self.accelerator, len(times))
        if training:
            self.step_metrics.merge(self._metrics["train"])
        elif prefix := (evaluation_prefix(logs) or "").removeprefix("eval_"):
            for name in [*(metrics := self._metrics["eval"])]:
                metrics[prefix + name] = metrics.pop(name)
        evaluated = not training and self.is_world_process_zero()
        with (
            patched_attribute(self, "_logs", flatten_conversations(self._logs)),
            keep_training_table(str(self.args.output_dir), self.state.global_step, evaluated),
            warn_of_lost_table(self._metrics[self.mode], self.log_completions),
        ):
            super().log(logs, start_time)
        if training:
            self.collapse_watch.start_window()
        if self.args.log_completions and self.is_world_process_zero():
            remove_oldest_tables(str(self.args.output_dir), self.args.rollout_log_max_megabytes * 1e6)
        self.recorder.log(logs, self.mode, self.reward_weights)

    def create_model_card(  # type: ignore[override]  # TRL's differs from its parent's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write TRL's model card with our tags, rewards, options and the papers to cite."""
        named_tags = [tags] if isinstance(tags, str) else tags or []
        rewards, origin = user_rewards(self.reward_func_names), str(self.model.config._name_or_path or "")
        super().create_model_card(model_name, dataset_name, [*named_tags, *method_tags(self.args, rewards)])
        if self.is_world_process_zero():
            extend_card(self.args, origin, rewards, model_name, dataset_name or self.data_source)

    # What the hooks and the functions they call share

    @contextmanager
    def new_rollout(self, rows: list[dict[str, Any]], **options: Any) -> Iterator[Rollout]:
        """Open a new rollout for the hooks in this block; rollouts may be nested."""
        if self._rollout is None:
            self.run.vision_cache.clear()
        first = self.accelerator.process_index * len(rows)
        rollout = Rollout(normalise_image_columns(rows), first, **options)
        with patched_attribute(self, "_rollout", rollout):
            yield rollout

    def _score_rollout(self, rollout: Rollout, batch: Batch) -> Scores:
        """Score a rollout, and set its signals."""
        want = wanted_scores(self.run, rollout, batch)
        if self.critic is not None:
            want = replace(want, values=self.critic.head)
        rollout.scores = scores = score(self.run, batch, want)
        rollout.signals = make_signals(scores, rollout.generated)
        return scores

    def generate_further(self, rows: list[dict[str, Any]]) -> Rollout:
        """Generate, score and reward a rollout of further rows."""
        with self.new_rollout(rows) as further:
            self.generate_and_score(further)
            return further

    def greedy_rewards(self, rows: list[dict[str, Any]], messages: list[Any]) -> torch.Tensor:
        """Reward a greedy completion per row, (N of all processes, F), without logging it."""
        with unlogged(self), override_sampling(self, {"temperature": 0}), self.new_rollout(rows, greedy=True):
            _, completion_ids, _, completions, *_ = self._generate(messages)
            rewards: torch.Tensor = self._calculate_rewards(rows, messages, completions, completion_ids)
            return rewards

    def answer(self, rows: list[dict[str, Any]], conversations: list[Any]) -> list[str]:
        """Sample one completion of each conversation without images, without logging it."""
        with unlogged(self), self.new_rollout(rows, blind=True):
            _, _, _, completions, *_ = self._generate(conversations)
        return [completion_text(completion) for completion in completions]

    def _show_columns(self, columns: Mapping[str, list[Any]]) -> None:
        """Add columns to the table of completions."""
        for name, values in columns.items():
            self._log_completion_extra(name, values)

    def _weights_of_mode(self) -> AbstractContextManager[Any]:
        """Set this step's reward weights; evaluations use the late weights, which keeps their scores comparable."""
        schedule, state = self.reward_schedule, self.state
        if not schedule.changes:
            return nullcontext()
        if not self.model.training:
            return patched_attribute(self, "reward_weights", self._weights_with(schedule.regular))
        early = schedule.early_steps(self.args.get_warmup_steps(state.max_steps), state.max_steps)
        self.reward_weights = self._weights_with(schedule.weights_at(state.global_step, early))
        return nullcontext()

    def _weights_with(self, of_task: Sequence[float]) -> torch.Tensor:
        """Return the reward weights with the task's replaced; the KL penalty's weight, the last, stays."""
        return torch.cat([self.reward_weights.new_tensor(of_task), self.reward_weights[len(of_task) :]])
