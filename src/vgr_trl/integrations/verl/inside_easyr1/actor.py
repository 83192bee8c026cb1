"""EasyR1 (b44b311) with signals: the actor measures them with log-probabilities, the trainer uses them."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import initialization, modeling_utils

# EasyR1 imports this name from a module where transformers 5 no longer has it. Ray workers import this file first.
vars(modeling_utils).setdefault("no_init_weights", initialization.no_init_weights)

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch
from verl.single_controller.base.decorator import register as decorator_register
from verl.trainer import core_algos, ray_trainer
from verl.trainer.core_algos import average_loss
from verl.workers import fsdp_workers
from verl.workers.actor import dp_actor

from vgr_trl.credit import active_rules, stack_weights
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.credit import (
    COLUMNS,
    ESTIMATORS,
    SignalContext,
    SignalOptions,
    make_estimator,
    resolve_options,
    set_signal_context,
    sum_loss_terms,
)
from vgr_trl.integrations.verl.signals import Context, build_actor_context, measure_pass, perturb_rows
from vgr_trl.patching import patched_attribute, patched_attributes
from vgr_trl.signals.ratios import visual_dependency

CONTEXT_KEY = "vgr"  # in the `meta_info` of a batch
PRESET_OPTION = "preset"  # option with the name of the estimator of this library


class SignalActor(dp_actor.DataParallelPPOActor):  # type: ignore[misc]
    """EasyR1's actor, which also measures attention and dependency if the batch requests it.

    `compute_log_prob`: stores measurements in `columns`, (N, T) each, in the order of the batch.
    `_forward_micro_batch`: runs `super()` under a probe, and again on perturbed images if needed.
    `update_policy`: adds the enabled terms to EasyR1's loss.
    """

    columns: Mapping[str, Tensor] = {}
    _context: Context | None = None
    _names: tuple[str, ...] = ()
    _perturbed_logps: Tensor | None = None

    @torch.no_grad()
    def compute_log_prob(self, data: Any) -> Tensor:
        """Return log-probabilities (N, T)."""
        context = data.meta_info.get(CONTEXT_KEY)
        if context is None or self.actor_optimizer is None:  # the reference model has no optimizer
            return super().compute_log_prob(data)
        with patched_attribute(self, "_context", context):
            logps, *columns = super().compute_log_prob(data).unbind(-1)
        self.columns = dict(zip(self._names, columns, strict=True))
        return logps

    def _forward_micro_batch(self, micro_batch: dict[str, Any], temperature: float) -> Tensor:
        """Return log-probabilities (N, T), or (N, T, 1 + C) with columns if measured without gradients."""
        plain, context = super()._forward_micro_batch, self._context
        if context is None:
            return plain(micro_batch, temperature)
        options = SignalOptions.read(context["options"])

        def perturbed() -> tuple[Tensor, Tensor]:
            rows, blind = perturb_rows(micro_batch, context)
            return plain({**micro_batch, "multi_modal_inputs": rows}, temperature), blind

        if torch.is_grad_enabled():
            logps = plain(micro_batch, temperature)
            if options.uses_perception_loss:
                self._perturbed_logps, _ = perturbed()
            return logps
        columns: dict[str, Tensor] = {}
        with ExitStack() as stack:
            if options.measures_attention:
                columns = stack.enter_context(self._measure_pass(micro_batch, context))
            logps = plain(micro_batch, temperature)
        columns = {name: self._select_responses(column, micro_batch) for name, column in columns.items()}
        if options.needs_dependency:
            other_logps, blind = perturbed()
            columns["vgr_dependency"] = visual_dependency(logps, other_logps).masked_fill(blind.unsqueeze(1), torch.nan)
        self._names = tuple(columns)
        return torch.stack([logps.float(), *(column.to(logps.device) for column in columns.values())], dim=-1)

    def update_policy(self, data: Any) -> dict[str, Any]:
        """Train on the batch, and return metrics."""
        context = data.meta_info.get(CONTEXT_KEY)
        if context is None:
            return super().update_policy(data)
        options, plain = SignalOptions.read(context["options"]), dp_actor.compute_policy_loss

        def loss(*, log_probs: Any, response_mask: Any, loss_avg_mode: str, **further: Any) -> Any:
            arguments = {"response_mask": response_mask, "loss_avg_mode": loss_avg_mode}
            value, metrics = plain(log_probs=log_probs, **arguments, **further)
            context = SignalContext(options, perturbed_logps=self._perturbed_logps)
            average = partial(average_loss, mask=response_mask, mode=loss_avg_mode)
            terms, of_terms = sum_loss_terms(context, log_probs, response_mask, average)
            return value + terms, metrics | of_terms

        patched_loss = patched_attribute(dp_actor, "compute_policy_loss", loss)
        with patched_attribute(self, "_context", context), patched_loss:
            return super().update_policy(data)

    def _measure_pass(self, micro_batch: dict[str, Any], context: Context) -> Any:
        ids, present, packed = micro_batch["input_ids"], micro_batch["attention_mask"], self.config.padding_free
        if packed and self.config.ulysses_size > 1:
            raise ConfigError("Attention cannot be measured in split sequences: set worker.actor.ulysses_size=1.")
        in_prompt = torch.arange(ids.size(1), device=ids.device) < ids.size(1) - micro_batch["responses"].size(-1)
        return measure_pass(self.actor_module, ids, present, in_prompt.expand_as(ids), context, packed)

    def _select_responses(self, column: Tensor, micro_batch: dict[str, Any]) -> Tensor:
        """Return the values at the positions that predict the response tokens, (N, T)."""
        present = micro_batch["attention_mask"].bool().to(column.device)
        along = torch.full(present.shape, torch.nan, device=column.device)
        along[present] = column
        return along[:, -micro_batch["responses"].size(-1) - 1 : -1]


class SignalWorker(fsdp_workers.FSDPWorker):  # type: ignore[misc]
    """EasyR1's worker with a `SignalActor`, whose columns are returned with the old log-probabilities."""

    @decorator_register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model with a `SignalActor`."""
        with patched_attribute(dp_actor, "DataParallelPPOActor", SignalActor):
            super().init_model()

    @decorator_register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_probs(self, data: Any) -> Any:
        """Return old log-probabilities and the columns measured with them."""
        output = super().compute_log_probs(data)
        columns, self.actor.columns = self.actor.columns, {}
        if columns:
            measured = DataProto.from_dict(tensors={name: column.cpu() for name, column in columns.items()})
            # Rows that processes with parts of a sequence share come back once.
            output = output.union(self.ulysses_sharding_manager.postprocess_data(measured))
        return output


def read_options(stated: Mapping[str, Any], estimator: str, filters: bool = False) -> tuple[str, SignalOptions]:
    """Return the name of this library's estimator, and the run's options.

    Args:
        stated: options, and optionally `preset`, the name of the estimator (default `vgr`).
        estimator: EasyR1's estimator, to which credit is applied.
        filters: whether `algorithm.online_filtering` is on.

    Raises:
        ConfigError: an option is unknown, out of range, or unsupported in this run.
    """
    preset = stated.get(PRESET_OPTION, "vgr")
    options = resolve_options(preset, {name: value for name, value in stated.items() if name != PRESET_OPTION})
    for rule, needs in active_rules(options).items():
        if "entropies" in needs:
            raise ConfigError(f"{rule} reads entropies, which EasyR1's actor does not compute: turn it off.")
    if estimator == "gae" and options.rewards_attention:
        raise ConfigError("Attention rewards compare completions of a prompt: use another adv_estimator than gae.")
    if options.collect_attentions and filters:
        raise ConfigError("online_filtering moves rows, which collect_attentions cannot follow: turn one off.")
    options.estimator = estimator
    return preset, options


class SignalTrainer(ray_trainer.RayPPOTrainer):  # type: ignore[misc]
    """EasyR1's trainer with signals. `fit` patches two functions of EasyR1's module while it runs.

    `_balance_batch`: requests measurements from the actor, by `meta_info`.
    `fit`: computes advantages with the signals as context, and removes `token_weights` from reward metrics.
    """

    signal_options: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        estimator, filters = self.config.algorithm.adv_estimator, self.config.algorithm.online_filtering
        self.preset, self.options = read_options(self.signal_options, estimator, filters)
        self._weights: Any = None

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._balance_batch(batch, metrics, *args, **kwargs)
        context = build_actor_context(self.options, int(self.global_step), self.processor or self.tokenizer)
        batch.meta_info[CONTEXT_KEY] = context
        self._metrics = metrics

    def fit(self) -> None:
        """Train."""
        reduce, advantage = ray_trainer.reduce_metrics, ray_trainer.compute_advantage
        taken, computed = (lambda metrics: reduce(self.take_token_weights(metrics))), self.compute_advantages
        with patched_attributes(ray_trainer, reduce_metrics=taken, compute_advantage=partial(computed, advantage)):
            super().fit()

    def take_token_weights(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Store the token weights among reward metrics, and return the others, which EasyR1 averages."""
        to_average = dict(metrics)
        weights = to_average.pop("token_weights", None)
        if not self.config.algorithm.online_filtering:  # it drops and reorders rows afterwards
            self._weights = self._weights if weights is None else weights
        return to_average

    def compute_advantages(self, plain: Any, data: Any, adv_estimator: str, **options: Any) -> Any:
        """Return the batch with advantages, and with `apply_to` mask also a weighted response mask.

        Args:
            plain: EasyR1's `compute_advantage`, whose other arguments follow.
        """
        mask = data.batch["response_mask"]
        weights, self._weights = self._weights, None
        weights = stack_weights(weights, mask) if weights is not None and self.options.token_weights else None
        columns = {name: data.batch[name] for name in COLUMNS if name in data.batch}
        with set_signal_context(SignalContext(self.options, columns, weights)) as context:
            data = plain(data, self.preset, **options)
        if context.response_mask is not None:
            data.batch["response_mask"] = context.response_mask
        self._metrics.update(context.metrics)
        return data


for name in ESTIMATORS:
    core_algos.register_adv_estimator(name)(make_estimator(name, core_algos.ADV_ESTIMATOR_MAP.__getitem__))
