"""What a stage may ask of the trainer it runs in, and how TRL's trainer answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, TrainerState
from transformers.utils import logging
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from vgr_trl.batch.inputs import Prompts
from vgr_trl.compat.round_logs import as_one_batch, replace_newest, unlogged
from vgr_trl.config import DAPOConfig
from vgr_trl.rewards.answers.text import completion_text
from vgr_trl.signals.head import head_of_rows
from vgr_trl.signals.measurement import policy_is_active
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.generation.eval_sampling import sampled
from vgr_trl.training.rollout import Rollout

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
