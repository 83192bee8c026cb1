"""Facts of a run, read once off the trainer, and the features that are planned from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from trl import GRPOTrainer

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.read_row import column_names, image_columns
from vgr_trl.sharing.report import Feature


@dataclass(frozen=True)
class RunFacts:
    """Options, model, rewards, data and launch of a run, as far as plans and checks read them.

    Attributes:
        model: the policy, before accelerate wraps it.
        processor: of the model, or its tokenizer.
        is_vlm: whether the model reads images.
        rewards: reward functions by name.
        completion_maker: the option by which a completion is more than an answer to its prompt, or None.
        has_tools: whether completions may call tools.
        train_columns: columns of the train data; None: a stream that does not list them.
        has_images: whether the data have a column of images, or may have.
        generation: options of generation by transformers, with the model's defaults; empty with vLLM.
        has_router_loss: whether the loss has the load-balancing term of a mixture of experts.
        zero_stage: of DeepSpeed; 0 without it.
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
    """Work that passes share or skip, each on, or off for a reason."""

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
    methods = [own[name] for own in dicts for name in ("_compute_loss", "compute_loss") if name in own]
    packages = {getattr(each, "__globals__", {}).get("__name__", "").partition(".")[0] for each in methods}
    return not packages <= {"transformers", "trl", "vgr_trl"}
