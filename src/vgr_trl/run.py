"""`Run`: options, model, processes and plans of a run, which its stages read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState
from trl import GRPOTrainer

from vgr_trl.batch import Prompts
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.read_row import column_names, image_columns
from vgr_trl.metrics.step_metrics import StageClock
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.sharing.model_support import Feature, SharingReport
from vgr_trl.signals.named import SIGNAL_COLUMNS, NamedSignal
from vgr_trl.vision import DummyImage, VisionCache


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for plans and checks: options, model, rewards, data and launch.

    Attributes:
        model: the policy, before accelerate wraps it.
        processor: processor of the model, or its tokenizer.
        is_vlm: whether the model reads images.
        rewards: reward functions by name.
        completion_maker: option whose code extends completions (tools, an environment or `rollout_func`), or None.
        has_tools: whether completions may call tools.
        train_columns: columns of the train data; None: a stream that does not list them.
        has_images: whether the data have a column of images, or may have.
        generation: options of generation by transformers, with the model's defaults; empty with vLLM.
        has_router_loss: whether the loss has the load-balancing term of a mixture of experts.
        zero_stage: stage of DeepSpeed; 0 without DeepSpeed.
        fsdp_version: 0 without FSDP.
        compiles: whether accelerate compiles the model.
        own_loss: whether a subclass or a patch has replaced a method of the loss.
    """

    args: DAPOConfig
    model: PreTrainedModel
    processor: Any
    is_vlm: bool
    rewards: Mapping[str, Any]
    completion_maker: str | None
    has_tools: bool
    train_columns: Sequence[str] | None
    has_images: bool
    generation: Mapping[str, Any]
    has_router_loss: bool
    zero_stage: int
    fsdp_version: int
    compiles: bool
    own_loss: bool

    @property
    def is_sharded(self) -> bool:
        """Whether a process has only parts of the parameters, as under FSDP and ZeRO-3."""
        return self.fsdp_version > 0 or self.zero_stage == 3


@dataclass(frozen=True)
class Features:
    """Work that passes share or skip; each feature is on, or off for a reason."""

    share_generation: Feature
    share_scoring: Feature
    share_training: Feature
    join_micro_batches: Feature
    regroup: Feature
    skip_zero_advantage: Feature
    skip_zero_advantage_tokens: Feature
    skip_padding: Feature
    skip_images: Feature
    reuse_first_pass: Feature

    @property
    def sharing(self) -> dict[str, Feature]:
        """Where prompts are computed once, by the stage of a step."""
        return {"generation": self.share_generation, "scoring": self.share_scoring, "training": self.share_training}

    def __str__(self) -> str:
        return "; ".join(f"{name}: {feature}" for name, feature in vars(self).items())


def iterate_datasets(train: Any, evaluation: Any) -> Iterator[tuple[str, Any]]:
    """Yield the train data and every part of the eval data, with a name for messages."""
    for name, dataset in (("train", train), ("eval", evaluation)):
        parts = dataset.values() if isinstance(dataset, dict) else [dataset]
        yield from ((name, part) for part in parts if part is not None)


def read_facts(trainer: GRPOTrainer) -> RunFacts:
    """Read the facts of a constructed trainer, once its data have prompts."""
    args: Any = trainer.args
    model: Any = trainer.model
    state = trainer.accelerator.state
    deepspeed = args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    makers = {
        "rollout_func": trainer.rollout_func,
        "environment_factory": trainer.environment_factories,
        "tools": trainer.tools,
    }
    maker = next((option for option, value in makers.items() if value), None)
    datasets = iterate_datasets(trainer.train_dataset, trainer.eval_dataset)
    return RunFacts(
        args=args,
        model=model,
        processor=trainer.processing_class,
        is_vlm=trainer._is_vlm,
        rewards=dict(zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)),
        completion_maker=maker,
        has_tools=bool(trainer.tools),
        train_columns=column_names(trainer.train_dataset),
        has_images=maker in ("environment_factory", "tools")
        or any(column_names(dataset) is None or image_columns(dataset) for _, dataset in datasets),
        generation={} if trainer.use_vllm else model._prepare_generation_config(trainer.generation_config)[0].to_dict(),
        has_router_loss=trainer.aux_loss_enabled,
        zero_stage=0 if deepspeed is None else deepspeed.zero_stage,
        fsdp_version=state.fsdp_plugin.fsdp_version if trainer.is_fsdp_enabled else 0,
        compiles=state.dynamo_plugin.backend.value != "NO",
        own_loss=has_own_loss(vars(trainer), type(trainer)),
    )


def has_own_loss(attributes: Mapping[str, Any], kind: type) -> bool:
    """Whether a subclass or a patch has replaced a method of the loss.

    Args:
        attributes: attributes of a trainer, in which a patched method stands.
        kind: class of the trainer.
    """
    dicts = [attributes, *map(vars, kind.__mro__)]
    methods = [scope[name] for scope in dicts for name in ("_compute_loss", "compute_loss") if name in scope]
    packages = {getattr(method, "__globals__", {}).get("__name__", "").partition(".")[0] for method in methods}
    return not packages <= {"transformers", "trl", "vgr_trl"}


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
        perturbations: perturbations under which completions are scored.
        row_views: name of a view of rows under which completions are scored -> its plug-in.
        teacher_top: number of the teacher's most likely tokens, for records and loss terms; 0 for loss terms: all.
        named: signals that options name, or plug-ins read.
        layers: number of the model's layers with attention; 0 where attention is not measured.
        samples_curves: whether attention that only metrics read is measured for a sample.
        term_needs: quantities that loss terms need.
    """

    needed: Mapping[str, str]
    vision_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    perturbations: tuple[str, ...] = ()
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
        reference: reference model; None if the policy without its adapter is the reference.
        facts: model, data and launch, for plans.
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
        plain_pass: TRL's scoring of a `Batch` by a model, for models and modes without a row.
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
