"""`Run`: options, model, processes and plans of a run, which its stages read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerState

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.metrics.step_metrics import StageClock
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.rows import Prompts
from vgr_trl.run_facts import Features, RunFacts
from vgr_trl.sharing.report import SharingReport
from vgr_trl.signals.named import SIGNAL_COLUMNS, NamedSignal
from vgr_trl.vision import DummyImage, VisionCache


@dataclass(frozen=True)
class Measurement:
    """Measurements of every rollout batch.

    Attributes:
        needed: name of a measurement -> the first option, reward or rule that needs it. `shift` is the shift of
            distributions under the perturbation, `views` log-probabilities under perturbations, `regions` attention to
            the regions of the question, `per_image` attention to each image, `values` values of a critic's head,
            `blind` answers without the image, `perception` perturbed images for the loss.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        views: perturbations under which completions are scored.
        row_views: name of a view of rows under which completions are scored -> its plug-in.
        teacher_top: number of tokens that the teacher finds most likely, for records and loss terms; 0 for the latter:
            all.
        named: signals that options name, or plug-ins read.
        layers: number of the model's layers with attention; 0 where attention is not measured.
        samples_curves: whether attention that only metrics read is measured for a sample.
        term_needs: quantities that loss terms need.
    """

    needed: Mapping[str, str]
    vision_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    views: tuple[str, ...] = ()
    row_views: Mapping[str, str] = field(default_factory=dict)
    teacher_top: int = 0
    named: tuple[NamedSignal, ...] = ()
    layers: int = 0
    samples_curves: bool = False
    term_needs: frozenset[str] = frozenset()

    def needs(self, *names: str) -> bool:
        """Whether any of these measurements is needed."""
        return not self.needed.keys().isdisjoint(names)

    @property
    def head(self) -> bool:
        """Whether a pass through the model's head is needed, for log-probabilities or entropies."""
        return self.needs("entropies", "dependency", "shift", "logps")

    @property
    def scoring(self) -> bool:
        """Whether a pass over the rollout batch is needed."""
        return self.head or self.needs("attention", "similarity", "values")

    @property
    def samples(self) -> bool:
        """Whether training rollouts are scored for the attention metrics alone, so that a sample is enough."""
        only_curves = self.needed.get("attention") == "compute_attention_metrics" and not self.named
        return self.samples_curves and only_curves and not (self.head or self.needs("similarity", "values"))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rewards get beside the columns of the data."""
        of_attention = (*SIGNAL_COLUMNS, "mdi_balance_ratio") if "attention" in self.needed and not self.samples else ()
        answers = (BLIND_ANSWERS,) if "blind" in self.needed else ()
        return (*of_attention, *answers, *(signal.name for signal in self.named if not signal.is_late))


@dataclass(frozen=True, eq=False)
class Run:
    """Options, model, processes and plans of a run; the trainer makes it once.

    Attributes:
        args: options, whose micro-batches have been joined.
        accelerator: processes, devices and autocast.
        processor: processor of the model, or its tokenizer.
        tokenizer: tokenizer of the processor.
        reference: reference model, if it is a model of its own.
        facts: model, data and launch, as plans read them.
        measurement: quantities that are measured of rollouts.
        features: work that passes share or skip.
        clock: time in each stage of a step.
        vision_cache: computes image features once per rollout.
        dummy_image: image of processes without one; None: no process needs it.
        sharing: counts of the prompts computed for rows since the last log.
        rows_per_chunk: rows of a micro-batch in the user's options, and of a scoring chunk.
        pad_to_multiple_of: P and T become multiples of it; None: they do not.
        end_tokens: tokens that end a completion.
        tokenize: turns conversations into prompts, as TRL does.
        to_device: moves the inputs of a pass to the device of this process, as transformers' trainer does.
        plain_pass: TRL's `_get_per_token_logps_and_entropies`, for models and modes without a row.
        get_model: returns the policy, which accelerate may have wrapped.
        get_state: returns the state of the trainer, which a resumed run replaces.
    """

    args: DAPOConfig
    accelerator: Accelerator
    processor: Any
    tokenizer: Any
    reference: nn.Module | None
    facts: RunFacts
    measurement: Measurement
    features: Features
    clock: StageClock
    vision_cache: VisionCache
    dummy_image: DummyImage | None
    sharing: SharingReport
    rows_per_chunk: int
    pad_to_multiple_of: int | None
    end_tokens: frozenset[int]
    tokenize: Callable[[list[Any]], Prompts]
    to_device: Callable[[Any], Any]
    plain_pass: Callable[..., tuple[Tensor, Any, Any]]
    get_model: Callable[[], Any]
    get_state: Callable[[], TrainerState]

    @property
    def model(self) -> Any:
        """The policy."""
        return self.get_model()

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        return self.get_state().global_step

    @property
    def trains(self) -> bool:
        """Whether the run trains now, and does not evaluate."""
        return bool(self.model.training)

    @property
    def completions_per_prompt(self) -> int:
        """G in this mode."""
        args = self.args
        return int((args.num_generations if self.trains else args.num_generations_eval) or args.num_generations or 1)

    def all_agree(self, answer: bool) -> bool:
        """Return whether the answer of every process is yes."""
        answers = torch.tensor([answer], device=self.accelerator.device)
        return bool(self.accelerator.gather(answers).all())
