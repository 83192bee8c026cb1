"""What of verl and EasyR1 is relied on, checked against the installed package when it is hung in."""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vgr_trl.errors import ConfigError


@dataclass(frozen=True)
class Point:
    """A name that is used, with the parameters that it is called with.

    Attributes:
        module: where it is.
        name: dotted, within the module.
        parameters: that it has to take by name.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return what is not there, None if all is."""
        try:
            found: Any = importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} ({error})"
        for part in self.name.split("."):
            if not hasattr(found, part):
                return f"{self.module}.{self.name}"
            found = getattr(found, part)
        if not self.parameters:
            return None
        taken = inspect.signature(found).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            return None
        lacking = [name for name in self.parameters if name not in taken]
        return f"{self.module}.{self.name}({', '.join(lacking)})" if lacking else None


_ESTIMATE = ("token_level_rewards", "response_mask", "index")
_LOSS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights")
CORE = "verl.trainer.ppo.core_algos"
OF_VERL = (
    Point(CORE, "ADV_ESTIMATOR_REGISTRY"),
    Point(CORE, "POLICY_LOSS_REGISTRY"),
    Point(CORE, "register_adv_est"),
    Point(CORE, "get_adv_estimator_fn"),
    Point(CORE, "compute_grpo_outcome_advantage", _ESTIMATE),
    Point(CORE, "register_policy_loss"),
    Point(CORE, "get_policy_loss_fn"),
    Point(CORE, "compute_policy_loss_vanilla", _LOSS),
    Point(CORE, "agg_loss", ("loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens")),
    Point("verl.workers.engine.base", "EngineRegistry.register", ("model_type", "backend", "device", "vendor")),
    Point(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.forward_step",
        ("micro_batch", "loss_function", "forward_only"),
    ),
    Point("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead._get_packed_pad_size"),
    Point("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead.get_data_parallel_group"),
    Point("verl.utils.tensordict_utils", "get_non_tensor_data", ("data", "key", "default")),
    Point("verl.utils.tensordict_utils", "assign_non_tensor_stack"),
    Point("verl.models.transformers.qwen2_vl", "_custom_flash_attention_forward"),
    Point("verl.models.transformers.monkey_patch", "is_trl_available"),
    Point("verl.workers.utils.padding", "no_padding_2_padding"),
    Point("verl.workers.utils.padding", "response_from_nested"),
    Point("transfer_queue", "kv_batch_get", ("keys", "partition_id", "select_fields")),
    Point("transfer_queue", "kv_batch_put", ("keys", "partition_id", "fields")),
    Point("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
    Point("verl.trainer.ppo.v1.trainer_base", "register_trainer"),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._compute_old_log_prob", ("batch", "metrics")),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._compute_advantage", ("batch", "metrics")),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._update_actor", ("batch", "metrics")),
    Point("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync._val_metrics_update", ("reward_extra_infos_dict",)),
)
ACTOR_OF_EASYR1 = (
    Point("verl.workers.actor.dp_actor", "DataParallelPPOActor._forward_micro_batch", ("micro_batch", "temperature")),
    Point("verl.workers.actor.dp_actor", "DataParallelPPOActor.compute_log_prob", ("data",)),
    Point("verl.workers.actor.dp_actor", "DataParallelPPOActor.update_policy", ("data",)),
    Point("verl.trainer.core_algos", "register_adv_estimator"),
    Point("verl.trainer.core_algos", "ADV_ESTIMATOR_MAP"),
    Point("verl.trainer.core_algos", "compute_policy_loss", ("old_log_probs", "log_probs", "advantages")),
    Point("verl.trainer.core_algos", "average_loss", ("mode",)),
)
OF_EASYR1 = (
    *ACTOR_OF_EASYR1,
    Point("verl.protocol", "DataProto.from_dict", ("tensors",)),
    Point("verl.single_controller.base.decorator", "Dispatch.ONE_TO_ALL"),
    Point("verl.single_controller.base.decorator", "Dispatch.DP_COMPUTE_PROTO"),
    Point("verl.single_controller.base.decorator", "register", ("dispatch_mode",)),
    Point("verl.workers.fsdp_workers", "FSDPWorker.init_model"),
    Point("verl.workers.fsdp_workers", "FSDPWorker.compute_log_probs", ("data",)),
    Point("verl.trainer.ray_trainer", "RayPPOTrainer.fit"),
    Point("verl.trainer.ray_trainer", "RayPPOTrainer._balance_batch", ("batch", "metrics")),
    Point("verl.trainer.ray_trainer", "compute_advantage", ("data", "adv_estimator", "gamma", "lam")),
    Point("verl.trainer.ray_trainer", "reduce_metrics"),
    Point("verl.trainer.main", "Runner"),
    Point("verl.trainer.main", "FSDPWorker"),
    Point("verl.trainer.main", "RayPPOTrainer"),
)


def check_points(points: Iterable[Point], tested: str) -> None:
    """Raise `ConfigError` that names what the installed package does not have.

    Args:
        points: that are relied on.
        tested: package and version that have them.
    """
    lacking = list(dict.fromkeys(missing for point in points if (missing := point.missing()) is not None))
    if lacking:
        from importlib.metadata import PackageNotFoundError, version

        try:
            installed = f"verl {version('verl')} is installed"
        except PackageNotFoundError:
            installed = "verl is not installed as a package"
        raise ConfigError(f"{installed}, and lacks {'; '.join(lacking)}: install {tested}, which this is tested with.")
