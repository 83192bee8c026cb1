"""Register this library in verl 0.9.1, in processes whose `VERL_USE_EXTERNAL_MODULES` names this module.

Registers estimators, losses, the trainer mode `vgr_sync` and the engine vendor `vgr` (`VERL_ENGINE_VENDOR=vgr`). The
engine measures signals in the pass for old log-probabilities, and its loss may use perturbed images. The trainer
requests this in the batch; a batch without a request is processed as in verl.
"""

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from vgr_trl.credit import stack_weights
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.credit import (
    COLUMNS,
    ESTIMATORS,
    LOSSES,
    SignalContext,
    SignalOptions,
    add_loss_terms,
    make_estimator,
    resolve_options,
    set_signal_context,
)
from vgr_trl.integrations.verl.signals import Context, build_actor_context, measure_pass, perturb_rows
from vgr_trl.patching import patched_attribute
from vgr_trl.sharing.model_support import attention_modules
from vgr_trl.signals.probe import find_decoder
from vgr_trl.signals.ratios import visual_dependency
from vgr_trl.signals.scoring import policy_is_active

# With padding removed, verl's Qwen2-VL and GLM-4V layers call an attention function directly. While measuring, these
# calls are routed through transformers' registry, where a probe finds them.

ATTENTION_MODULES = ("verl.models.transformers.qwen2_vl", "verl.models.transformers.glm4v")
ATTENTION_FUNCTION = "_custom_flash_attention_forward"


@contextmanager
def route_through_registry(model: Any) -> Iterator[None]:
    """Route the attention calls of the layers of `model` through transformers' registry in this block."""
    running: list[Any] = []

    def enter(module: Any, args: Any) -> None:
        running[:] = [module]

    with ExitStack() as stack:
        for module in attention_modules(find_decoder(model)):
            stack.callback(module.register_forward_pre_hook(enter).remove)
        for name in ATTENTION_MODULES:
            owner = importlib.import_module(name)
            if (plain := vars(owner).get(ATTENTION_FUNCTION)) is not None:
                through = partial(_call_registry, plain, running)
                stack.enter_context(patched_attribute(owner, ATTENTION_FUNCTION, through))
        yield


def _call_registry(plain: Any, running: list[Any], query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Call `plain` (rows, positions, heads, width) with transformers' layout (rows, heads, positions, width)."""

    def function(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return plain(*(side.transpose(1, 2) for side in (query, key, value)), mask, **options), None

    attention = ALL_ATTENTION_FUNCTIONS.get_interface("eager", function)
    sides = (side.transpose(1, 2) for side in (query, key, value))
    return attention(running[0], *sides, mask, **options)[0]


CONTEXT_KEY = "vgr"  # in the batch


class SignalEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine, which also measures attention and dependency if the batch requests it.

    `forward_step` runs `super()` under a probe, and a second time on perturbed images for the dependency or the
    perception loss.
    """

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Return verl's loss and outputs, with columns of signals in `model_output` after a measured pass."""
        context = tu.get_non_tensor_data(data=micro_batch, key=CONTEXT_KEY, default=None)
        if context is None or (forward_only and not policy_is_active(self.module)):
            return super().forward_step(micro_batch, loss_function, forward_only)
        step = self._measured_step if forward_only else self._training_step
        return step(micro_batch, loss_function, SignalOptions.read(context["options"]), context)

    def _measured_step(self, micro_batch: Any, loss_function: Any, options: SignalOptions, context: Context) -> Any:
        offsets, columns = micro_batch["input_ids"].offsets(), dict[str, Tensor]()
        with ExitStack() as stack:
            if options.measures_attention:
                stack.enter_context(route_through_registry(self.module))
                columns = stack.enter_context(self._measure_pass(micro_batch, context))
            loss, output = super().forward_step(micro_batch, loss_function, True)
        measured = output["model_output"]
        for name, column in columns.items():
            measured[name] = torch.nested.nested_tensor_from_jagged(column, offsets)
        if options.needs_dependency:
            perturbed, blind = self._perturb(micro_batch, context)
            _, second = super().forward_step(perturbed, loss_function, True)
            logps, other_logps = (outputs["log_probs"].values()[None] for outputs in (measured, second["model_output"]))
            dependency = visual_dependency(logps, other_logps)[0]
            dependency = dependency.masked_fill(blind.repeat_interleave(offsets.diff()), torch.nan)
            measured["vgr_dependency"] = torch.nested.nested_tensor_from_jagged(dependency, offsets)
        return loss, output

    def _training_step(self, micro_batch: Any, loss_function: Any, options: SignalOptions, context: Context) -> Any:
        logps = None
        if options.uses_perception_loss:
            kept: dict[str, Any] = {}

            def keep(model_output: Any, data: Any, dp_group: Any = None) -> Any:
                kept["logps"] = no_padding_2_padding(model_output["log_probs"], data)
                return kept["logps"].sum() * 0, {}

            super().forward_step(self._perturb(micro_batch, context)[0], keep, False)
            logps = kept["logps"]
        with set_signal_context(SignalContext(options, perturbed_logps=logps)):
            return super().forward_step(micro_batch, loss_function, False)

    def _measure_pass(self, micro_batch: Any, context: Context) -> Any:
        if self.use_ulysses_sp:
            raise ConfigError("Attention cannot be measured in split sequences: set ulysses_sequence_parallel_size=1.")
        ids, prompts = micro_batch["input_ids"], micro_batch["prompts"]
        if prompts.is_nested:
            prompt_lengths = prompts.offsets().diff()
        else:
            prompt_lengths = micro_batch["attention_mask"][:, : prompts.shape[1]].sum(dim=1)
        padded = torch.nested.to_padded_tensor(ids, padding=0)
        columns = torch.arange(padded.size(1), device=padded.device)
        present, prompt = (columns < lengths.unsqueeze(1) for lengths in (ids.offsets().diff(), prompt_lengths))
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        pad = self._get_packed_pad_size(len(ids.values())) if packed else 0
        return measure_pass(self.module, padded, present, prompt, context, packed, pad)

    def _perturb(self, micro_batch: Any, context: Context) -> tuple[Any, Tensor]:
        """Return the micro-batch with perturbed images, and which rows have none, (N,) bool."""
        rows, blind = perturb_rows(micro_batch, context)
        perturbed = micro_batch.clone(recurse=False)
        tu.assign_non_tensor_stack(perturbed, "multi_modal_inputs", rows)
        return perturbed, blind


WEIGHTS_KEY = "token_weights"  # in the output of a reward


def read_options(config: Any) -> SignalOptions:
    """Read the options under `algorithm.vgr` of a verl configuration.

    Raises:
        ConfigError: an option is unknown, out of range, or unsupported in this run.
    """
    stated: Any = config.algorithm.get("vgr")
    stated = OmegaConf.to_container(stated, resolve=True) if stated is not None else {}
    loss_mode = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    options = resolve_options(config.algorithm.adv_estimator, stated, loss_mode)
    if options.apply_to == "mask":
        raise ConfigError("apply_to is mask, but verl casts response_mask to bool, losing the weights: use advantages.")
    correction = config.algorithm.get("rollout_correction")
    measures = options.measures_attention or options.needs_dependency
    if measures and correction is not None and correction.get("bypass_mode", False):
        raise ConfigError("algorithm.rollout_correction.bypass_mode skips the pass that measures signals: turn it off.")
    return options


class SignalTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's trainer with signals.

    `_compute_old_log_prob`: requests measurements, and stores them for the responses.
    `_compute_advantage`: sets them as the context of the registered estimators, and logs metrics.
    `_update_actor`: tells the engine which loss terms are enabled.
    `_val_metrics_update`: drops token weights, which verl would average.
    """

    def __init__(self, config: Any) -> None:
        self.signal_options = read_options(config)
        super().__init__(config)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        options, plain = self.signal_options, super()._compute_old_log_prob
        if not (options.measures_attention or options.needs_dependency):
            return plain(batch, metrics)
        after = self._call_with_context(plain, batch, metrics)
        self._cut_to_responses(batch)
        return after

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if any(not key.endswith("_0") for key in batch.keys):  # PROMPT_SESSION_OUTPUT
            raise ConfigError("An agent loop returned several outputs of one session: return one per session.")
        data = _read_fields(batch, [*COLUMNS, "entropy", "old_log_probs", "response_mask"])
        columns = {name: column.to_padded_tensor(0) for name, column in data.items()}
        if "entropy" in columns:
            columns["entropies"] = columns.pop("entropy")
        weights = self._read_token_weights(batch, columns.pop("response_mask"))
        with set_signal_context(SignalContext(self.signal_options, columns, weights)) as context:
            after = super()._compute_advantage(batch, metrics)
        metrics.update(context.metrics)
        return after

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        plain = super()._update_actor
        if self.config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla") in LOSSES:
            return self._call_with_context(plain, batch, metrics)
        return plain(batch, metrics)

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Mapping[str, Any], *rest: Any, **more: Any
    ) -> Any:
        infos = {name: values for name, values in reward_extra_infos_dict.items() if name != WEIGHTS_KEY}
        return super()._val_metrics_update(data_sources, sample_uids, infos, *rest, **more)

    def _call_with_context(self, plain: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        """Call a method of verl's trainer that sends the batch to the engine, with our context."""
        tokenizer = self.processor or self.tokenizer
        batch.extra_info[CONTEXT_KEY] = build_actor_context(self.signal_options, int(self.global_steps), tokenizer)
        after = plain(batch, metrics)
        for meta in (batch, after):
            (meta.extra_info or {}).pop(CONTEXT_KEY, None)
        return after

    def _cut_to_responses(self, batch: Any) -> None:
        """Cut the columns, which the engine returns for whole sequences, to the responses."""
        data = _read_fields(batch, [*COLUMNS, "response_mask"])
        columns = {name: response_from_nested(data[name], data["response_mask"]) for name in COLUMNS if name in data}
        if columns:
            fields = TensorDict(columns, batch_size=len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _read_token_weights(self, batch: Any, response_mask: Tensor) -> Tensor | None:
        """Return the `token_weights` that the reward returned besides the score, or None if no row has them."""
        if not self.signal_options.token_weights:
            return None
        data = _read_fields(batch, ["extra_fields"])
        fields = list(data["extra_fields"]) if "extra_fields" in data else []
        infos = [(getattr(field, "data", field) or {}).get("reward_extra_info") or {} for field in fields]
        rows = [info.get(WEIGHTS_KEY) for info in infos]
        return None if all(row is None for row in rows) else stack_weights(rows, response_mask)


def _read_fields(batch: Any, fields: list[str]) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


# verl 0.9.1 imports a value-head class from an installed TRL and fails with TRL 1.16, which removed it. The class is
# not used, so report TRL as missing. Remove this when verl no longer imports the class unconditionally.
monkey_patch.is_trl_available = lambda: False

TRAINER_MODE, ENGINE_VENDOR, TESTED_VERSION = "vgr_sync", "vgr", "0.9.1"

if version("verl") != TESTED_VERSION:
    warnings.warn(f"verl {version('verl')} is installed; vgr_trl is tested with verl {TESTED_VERSION}.", stacklevel=2)
for name in ESTIMATORS:
    core_algos.register_adv_est(name)(make_estimator(name, core_algos.get_adv_estimator_fn))
vanilla = core_algos.get_policy_loss_fn("vanilla")
for name in LOSSES:
    core_algos.register_policy_loss(name)(add_loss_terms(vanilla, core_algos.agg_loss, name))
register_trainer(TRAINER_MODE)(SignalTrainer)
EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=ENGINE_VENDOR
)(SignalEngine)
