"""The two objects that stages hand on, and what a stage may ask of the trainer it runs in."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerState,
)
from transformers.utils import logging
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from vgr_trl.batch import AttentionMass, Placement, Prompts, RolloutSignals
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.patches import as_one_batch, replace_newest, unlogged
from vgr_trl.rewards.answers import completion_text
from vgr_trl.signals.scoring import head_of_rows, policy_is_active
from vgr_trl.utils import replaced

# ---------------------------------------------------------------------------------------------------------------------
# TRL's trainer once it is constructed, with the narrower types that its attributes then have.


if TYPE_CHECKING:

    class ConstructedTrainer(GRPOTrainer):
        """For annotations: what a constructor has made certain."""

        args: DAPOConfig
        model: PreTrainedModel
        processing_class: PreTrainedTokenizerBase | ProcessorMixin
        train_dataset: Dataset | IterableDataset
        eval_dataset: Dataset | IterableDataset | DatasetDict | IterableDatasetDict | None
        shuffle_dataset: bool
        num_generations: int
        num_generations_eval: int
        _logs: dict[str, Any]
        _buffered_inputs: Any

else:
    ConstructedTrainer = GRPOTrainer


# ---------------------------------------------------------------------------------------------------------------------
# Sampling in evaluations, where the options say that it differs from that in training.


@contextmanager
def sampling_of_mode(trainer: ConstructedTrainer) -> Iterator[None]:
    """In this block completions are sampled as the mode at hand, training or evaluation, wants it."""
    args = trainer.args
    given = {"temperature": args.eval_temperature, "top_p": args.eval_top_p}
    wanted = {name: value for name, value in given.items() if value is not None}
    if trainer.model.training or not wanted:
        yield
        return
    with ExitStack() as stack:
        if trainer.use_vllm:
            for name, value in wanted.items():
                stack.enter_context(replaced(trainer.vllm_generation, name, value))
        else:
            stack.enter_context(sampled(trainer, wanted))
        yield


@contextmanager
def sampled(trainer: ConstructedTrainer, wanted: Mapping[str, float]) -> Iterator[None]:
    """In this block transformers samples with other values of its options; a temperature of 0 is greedy."""
    config = GenerationConfig(**_changed(trainer.generation_config.to_diff_dict(), wanted))
    options = _changed(trainer.generation_kwargs, wanted)
    with replaced(trainer, "generation_config", config), replaced(trainer, "generation_kwargs", options):
        yield


def _changed(options: dict[str, Any], wanted: Mapping[str, float]) -> dict[str, Any]:
    if wanted.get("temperature") == 0:
        kept = ("temperature", "top_p", "top_k", "min_p", "do_sample")
        return {**{name: value for name, value in options.items() if name not in kept}, "do_sample": False}
    return {**options, **wanted}


# ---------------------------------------------------------------------------------------------------------------------
# What a rollout batch, and a micro-batch of it, have become so far: the two objects that stages hand on.


@dataclass
class Verdict:
    """What all processes know of the groups of a rollout batch.

    Attributes:
        placement: of the batch.
        rewards: weighted sums, (N of all,), NaN where no function applied.
        advantages: (N of all,).
        dead: numbers of the groups without a gradient, and of those that are left out.
        filtered: those of the dead whose rewards differ.
    """

    placement: Placement
    rewards: torch.Tensor
    advantages: torch.Tensor
    dead: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)

    @property
    def live(self) -> list[int]:
        """Numbers of the groups with a gradient."""
        return [group for group in range(self.placement.num_groups) if group not in self.dead]

    @property
    def here(self) -> slice:
        """The rows of this process among those of all."""
        first = self.placement.process_index * self.placement.rows
        return slice(first, first + self.placement.rows)

    def live_rows(self, replaced: Iterable[int] = ()) -> torch.Tensor:
        """Which rows of this process have a gradient once others took the place of the groups `replaced`, (N,) bool."""
        live = torch.ones(self.placement.rows, dtype=torch.bool)
        for group in set(self.dead).difference(replaced):
            live[[row for row, _ in self.placement.here(group)]] = False
        return live


@dataclass
class Noise:
    """How completions of a rollout were sampled from perturbed images.

    Attributes:
        rows: of this process, whether each was.
        generations: completions of each prompt that were.
        strength: of the perturbation, in [0, 1].
        prompts: as they were given to generation, perturbed ones among them; None if there were none.
    """

    rows: list[bool]
    generations: int
    strength: float
    prompts: Prompts | None = None


@dataclass
class Rollout:
    """One rollout batch of this process, from its rows to its advantages.

    TRL's hooks and the stages fill it in the order of the attributes.

    Attributes:
        rows: of the data, one per completion.
        recorded: rows that are recorded, whose attention over the image is kept token by token; None if nothing of the
            batch is recorded in any process.
        judging: whether its rewards are being computed, or have been.
        greedy: whether there is one greedy completion per row, of which nothing is logged (ReMax).
        blind: whether questions are answered without their images, for rewards of another rollout.
        messages: the prompts as conversations with their images.
        prompts: of the first generation of the batch, with their own images.
        noise: how some were perturbed for generation; None: they were not.
        generated_mass: attention measured while generating.
        prompt_mass: attention of the prompt's own instruction tokens, (L, N, 1).
        maps: row -> attention over its vision tokens, (layers that rewards read, T, V).
        signals: of the completions.
        reference_logps: (N, T), of the completions under the reference.
        hidden, reference_hidden: (N, T, D) of the positions that emit them, where whole distributions are compared.
        shift: how these differ under the perturbation, and their entropies under it, (N, T) each.
        values: (N, T), that a critic has read off the pass over the completions.
        kl_penalty: (N, T), at most 0 for most kinds: what the KL adds to the reward of each token.
        perturbed_images: of each row, as they were perturbed for the dependency.
        changes: of the log-probabilities when images are perturbed, (N, T).
        rewards: unweighted, of all processes, (N of all, number of functions).
        batch: what TRL trains on.
        verdict: which groups have a gradient.
        replaced: numbers of the groups whose place others have taken.
        live: rows with a gradient, (N,) bool.
        metrics: of what was measured on perturbed images.
    """

    rows: list[dict[str, Any]]
    recorded: tuple[int, ...] | None = None
    greedy: bool = False
    judging: bool = False
    blind: bool = False
    messages: list[Any] | None = None
    prompts: Prompts | None = None
    noise: Noise | None = None
    generated_mass: AttentionMass | None = None
    prompt_mass: AttentionMass | None = None
    maps: dict[int, torch.Tensor] | None = None
    signals: RolloutSignals | None = None
    reference_logps: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    reference_hidden: torch.Tensor | None = None
    shift: tuple[torch.Tensor, torch.Tensor] | None = None
    values: torch.Tensor | None = None
    kl_penalty: torch.Tensor | None = None
    perturbed_images: list[list[Any]] | None = None
    changes: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    batch: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    replaced: list[int] = field(default_factory=list)
    live: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainingPass:
    """One micro-batch while TRL's `_compute_loss` runs on it.

    Attributes:
        inputs: of the loss.
        model: that is trained on it, as the loss got it.
        logps: (N, T) with gradients, of the first pass through the model; None before it.
        values: (N, T) with gradients, that a critic has read off that pass.
        hidden: (N, T', D) with gradients, of its positions that emit; T' is T but for columns without a live token.
        live: (N, T) bool, the tokens whose log-probabilities the loss reads; None before the first pass.
        rows_run: rows that the first pass ran.
    """

    inputs: dict[str, Any]
    model: nn.Module | None = None
    logps: torch.Tensor | None = None
    values: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    live: torch.Tensor | None = None
    rows_run: int = 0


def weighted_sums(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of rewards (N, F), (N,); NaN for a completion that none applies to."""
    sums = (rewards * weights.to(rewards)).nansum(dim=1)
    return sums.masked_fill(rewards.isnan().all(dim=1), torch.nan)


# ---------------------------------------------------------------------------------------------------------------------
# What a stage may ask of the trainer it runs in, and how TRL's trainer answers.


logger = logging.get_logger(__name__)


class Host(Protocol):
    """The trainer as the stages see it; `TRLHost` is the one there is.

    Attributes:
        args: every option.
        accelerator: the processes.
        state: of the run.
        mode: "train" or "eval".
        num_generations: completions per prompt in this mode.
        reward_names: of the reward functions, in order.
        reward_weights: (F,), those of this step.
        tokenizer: of the processor.
        processor: of prompts, a tokenizer where there are no images.
        end_token_ids: tokens that a finished completion ends with.
        pad_to_multiple_of: of prompt and completion lengths.
        accumulation_steps: micro-batches of the optimizer step at hand; the last one of an epoch may have fewer.
    """

    @property
    def args(self) -> DAPOConfig: ...

    @property
    def accelerator(self) -> Accelerator: ...

    @property
    def state(self) -> TrainerState: ...

    @property
    def mode(self) -> str: ...

    @property
    def num_generations(self) -> int: ...

    @property
    def reward_names(self) -> list[str]: ...

    @property
    def reward_weights(self) -> torch.Tensor: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def processor(self) -> PreTrainedTokenizerBase | ProcessorMixin: ...

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    @property
    def pad_to_multiple_of(self) -> int | None: ...

    @property
    def accumulation_steps(self) -> int: ...

    def whose(self, model: nn.Module) -> str:
        """Return whose pass one through `model` is: "policy", "reference" or "other"."""

    def newest_metrics(self) -> dict[str, float]:
        """Return the last value of everything that waits to be logged in this mode."""

    def score(
        self,
        inputs: dict[str, Any],
        head: bool = True,
        rows: Sequence[int] | None = None,
        model: nn.Module | None = None,
    ) -> torch.Tensor:
        """Return log-probabilities (N, T) of a batch under the policy, as TRL scores it, without gradients.

        Args:
            inputs: as `scoring_inputs` gives them.
            head: False: the pass ends before the head but for `rows`, and what is returned of others is NaN.
            rows: of this process; None where no process has any.
            model: another one to score with, which TRL's scoring can call; None: the policy.
        """

    def tokenize(self, prompts: list[Any]) -> Prompts:
        """Return conversations as they are given to generation."""

    def judge(self, rows: list[dict[str, Any]], verdict: Callable[[Rollout], object]) -> Rollout:
        """Return another rollout batch, within the one at hand: generated, measured, rewarded and perceived.

        Args:
            verdict: called with the rollout before it ends.
        """

    def earn_greedily(self, rows: list[dict[str, Any]], messages: list[Any]) -> torch.Tensor:
        """Return the rewards of a greedy completion of each row, (N of all, F); nothing of it is logged."""

    def answer(self, rows: list[dict[str, Any]], conversations: list[Any]) -> list[str]:
        """Return one completion of each conversation without images, sampled as in rollouts; none of it is logged."""

    def as_one_batch(self, completions: int) -> AbstractContextManager[list[int]]:
        """Let what is logged of further rounds in this block count as one batch with the rollout at hand.

        Yields:
            completions of this process in each round, beginning with those given; to be added to.
        """

    def show_columns(self, columns: Mapping[str, list[Any]]) -> None:
        """Add columns to the table of completions."""

    def correct_logged_advantages(self, advantages: Sequence[float]) -> None:
        """Put advantages in the place of the newest in the table of completions."""


class TRLHost:
    """TRL's `GRPOTrainer` as a `Host`.

    Args:
        begin: the trainer's context in which its hooks fill a new rollout of the rows given.
        fill: generates, measures and judges a rollout that has begun.
    """

    def __init__(
        self,
        trainer: ConstructedTrainer,
        begin: Callable[..., AbstractContextManager[Rollout]],
        fill: Callable[[Rollout], Rollout],
    ) -> None:
        self.trainer, self._begin, self._fill = trainer, begin, fill
        self.args = trainer.args
        self.accelerator: Accelerator = trainer.accelerator
        self.reward_names: list[str] = list(trainer.reward_func_names)
        self.tokenizer: PreTrainedTokenizerBase = trainer._tokenizer
        self.processor = trainer.processing_class
        self.pad_to_multiple_of = int(trainer.pad_to_multiple_of) if trainer.pad_to_multiple_of else None
        self.end_token_ids = frozenset({*trainer.eos_token_ids, self.tokenizer.pad_token_id})

    @property
    def state(self) -> TrainerState:  # which the trainer replaces when it resumes
        return self.trainer.state

    @property
    def mode(self) -> str:
        return "train" if self.trainer.model.training else "eval"

    @property
    def num_generations(self) -> int:
        return int(self.trainer.num_generations if self.mode == "train" else self.trainer.num_generations_eval)

    @property
    def reward_weights(self) -> torch.Tensor:
        return self.trainer.reward_weights

    @property
    def accumulation_steps(self) -> int:
        return self.trainer.current_gradient_accumulation_steps

    def whose(self, model: nn.Module) -> str:
        """A policy whose adapter is off is its own reference."""
        if model is self.trainer.ref_model or not policy_is_active(model):
            return "reference"
        return "policy" if model is self.trainer.model else "other"

    def newest_metrics(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self.trainer._metrics[self.mode].items() if values}

    def score(
        self,
        inputs: dict[str, Any],
        head: bool = True,
        rows: Sequence[int] | None = None,
        model: nn.Module | None = None,
    ) -> torch.Tensor:
        """Score in the chunks in which TRL scores."""
        trainer, args = self.trainer, self.args
        checkpointing: Any = args.gradient_checkpointing_kwargs
        inputs = Trainer._prepare_inputs(trainer, inputs)
        chunk = args.per_device_train_batch_size if self.mode == "train" else args.per_device_eval_batch_size
        scored = trainer.model if model is None else model
        narrowed = nullcontext() if head else head_of_rows(scored, rows)
        plainly = disable_gradient_checkpointing(trainer.model, checkpointing)
        with torch.no_grad(), plainly, narrowed:
            logps: torch.Tensor = trainer._get_per_token_logps_and_entropies(scored, batch_size=chunk, **inputs)[0]
            return logps

    def tokenize(self, prompts: list[Any]) -> Prompts:
        """Tokenize as TRL does, past the hook that keeps the prompts of a rollout."""
        return Prompts(*GRPOTrainer._tokenize_prompts(self.trainer, prompts))

    def judge(self, rows: list[dict[str, Any]], verdict: Callable[[Rollout], object]) -> Rollout:
        with self._begin(rows) as rollout:
            verdict(self._fill(rollout))
            return rollout

    def earn_greedily(self, rows: list[dict[str, Any]], messages: list[Any]) -> torch.Tensor:
        """Generate and reward as TRL does, greedily and unlogged."""
        trainer = self.trainer
        with unlogged(trainer), sampled(trainer, {"temperature": 0}), self._begin(rows, greedy=True):
            _, completion_ids, _, completions, *_ = trainer._generate(messages)
            rewards: torch.Tensor = trainer._calculate_rewards(rows, messages, completions, completion_ids)
            return rewards

    def answer(self, rows: list[dict[str, Any]], conversations: list[Any]) -> list[str]:
        """Generate as TRL does, unlogged."""
        trainer = self.trainer
        with unlogged(trainer), self._begin(rows, blind=True):
            _, _, _, completions, *_ = trainer._generate(conversations)
        return [completion_text(completion) for completion in completions]

    def as_one_batch(self, completions: int) -> AbstractContextManager[list[int]]:
        return as_one_batch(self.trainer, completions)

    def show_columns(self, columns: Mapping[str, list[Any]]) -> None:
        for name, values in columns.items():
            self.trainer._log_completion_extra(name, values)

    def correct_logged_advantages(self, advantages: Sequence[float]) -> None:
        replace_newest(self.trainer._logs["advantages"], list(advantages))
