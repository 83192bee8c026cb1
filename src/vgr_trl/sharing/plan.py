"""Where a run computes each prompt once for its completions, where it does not, and why; and doing so, counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vgr_trl.sharing.backbone import has_active_dropout, recomputes_without_graph
from vgr_trl.sharing.context import leave_out_empty_images, share_prompts
from vgr_trl.sharing.fitness import why_not_share
from vgr_trl.sharing.grouping import why_not_regroup
from vgr_trl.sharing.report import SharingReport


@dataclass(frozen=True)
class Place:
    """Generation, scoring or training; `reason_off` is None where prompts are shared."""

    reason_off: str | None

    def __str__(self) -> str:
        return "on" if self.reason_off is None else f"off ({self.reason_off})"


@dataclass(frozen=True)
class SharingPlan:
    """What `share_prompts` comes to in a run; printed as the one line that says so."""

    mode: str
    generation: Place
    scoring: Place
    training: Place
    regroup_reason: str | None
    regroups: bool
    sharded: bool
    dropout: bool

    def __str__(self) -> str:
        if self.mode == "off":
            return "share_prompts=off"
        together = "kept together" if self.regroups else f"shuffled ({self.regroup_reason or 'training is off'})"
        changed = f", although {self.regroup_reason}" if self.regroups and self.regroup_reason else ""
        return (
            f"share_prompts={self.mode}: generation {self.generation}, scoring {self.scoring}, training "
            f"{self.training}; completions of a prompt {together}{changed}"
            + (
                "; with dropout or noise in routers, the completions of a prompt share what is drawn over it"
                if self.dropout
                else ""
            )
        )


def plan_sharing(trainer: Any) -> SharingPlan:
    """Return where the constructed `trainer` shares prompts, by its option `share_prompts` and its model."""
    mode = trainer.args.share_prompts
    sharded = _is_sharded(trainer)
    regroup_reason = why_not_regroup(
        loss_type=trainer.loss_type,
        entropy_bonus=trainer._entropy_bonus_enabled,
        top_entropy_quantile=trainer.top_entropy_quantile,
        router_loss=trainer.aux_loss_enabled,
        steps_per_generation=trainer.args.steps_per_generation,
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
    )
    model = trainer.model
    everywhere = "share_prompts=off" if mode == "off" else None
    if everywhere is None and sharded and mode == "auto":
        everywhere = "sharded parameters, not tested on a GPU: share_prompts=on shares there too"
    generation = everywhere or _why_not_generate(trainer) or why_not_share(model, gradients=False)
    compiled = "torch.compile" if _compiles(trainer) else None
    scoring = everywhere or compiled or why_not_share(model, gradients=False)
    training = everywhere or compiled or _why_not_train(trainer) or why_not_share(model, gradients=True)
    return SharingPlan(
        mode=mode,
        generation=Place(generation),
        scoring=Place(scoring),
        training=Place(training),
        regroup_reason=regroup_reason,
        regroups=training is None and (regroup_reason is None or mode == "on"),
        sharded=sharded,
        dropout=None in (generation, training) and has_active_dropout(model, when_training=True),
    )


def _why_not_generate(trainer: Any) -> str | None:
    if trainer.use_vllm:
        return "vLLM shares prompts itself"
    if trainer.use_transformers_continuous_batching:
        return "continuous batching"
    return "FSDP" if trainer.is_fsdp_enabled else None


def _why_not_train(trainer: Any) -> str | None:
    """What only shows once the trainer has started: it wraps the model and switches checkpointing on later."""
    if trainer.args.gradient_checkpointing:
        reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
    else:
        reentrant = recomputes_without_graph(trainer.model, when_training=True)
    if reentrant:
        return "gradient checkpointing with use_reentrant=True"
    if trainer.aux_loss_enabled:
        return "the load-balancing loss needs the router of every token"
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "the first version of FSDP"
    return None


def _compiles(trainer: Any) -> bool:
    return bool(trainer.accelerator.state.dynamo_plugin.backend.value != "NO")


def _is_sharded(trainer: Any) -> bool:
    plugin = trainer.args.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)


class SharedPasses:
    """Shares prompts where a plan says so.

    Args:
        plan: of the run.
        agree: as `share_prompts` takes it.
    """

    def __init__(self, plan: SharingPlan, agree: Callable[[bool], bool]) -> None:
        self.plan, self._agree = plan, agree if plan.sharded else None
        self._report = SharingReport()

    @contextmanager
    def around(self, place: Place, model: Any, completion_length: int | None = None) -> Iterator[None]:
        """Share prompts in passes of this block.

        Args:
            place: of the plan.
            model: as `share_prompts` takes it.
            completion_length: T of a scored batch; None where the model generates.
        """
        if place.reason_off is not None:
            generates = completion_length is None
            with leave_out_empty_images(model, agree=None if generates else self._agree):
                yield
            return
        with share_prompts(model, completion_length, agree=self._agree) as report:
            yield
        self._report.add(report)

    def metrics(self) -> dict[str, float]:
        """Return what was shared since the last call."""
        report, self._report = self._report, SharingReport()
        return {"sharing/prompts_per_row": report.prompts_per_row} if report.rows else {}
