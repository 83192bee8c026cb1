"""Weights of a vision-language model resumed under the names they were saved with.

transformers saves vision-language models under other names than their parameters have. `from_pretrained` renames them
back; the trainer's own loading does not, and then keeps the weights of the start with a warning (seen with transformers
5.23 and Qwen2.5-VL). Removable when `Trainer._load_from_checkpoint` renames.
"""

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedModel, Trainer

from vgr_trl.errors import ConfigError


def whole_model(trainer: Trainer, model: Any) -> PreTrainedModel | None:
    """Return the model inside, if it is whole and unsharded: where the trainer would keep the weights of the start."""
    target = trainer.accelerator.unwrap_model(model)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return target if isinstance(target, PreTrainedModel) and not sharded else None


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Set the weights of `model`, in place, to those saved in the folder `checkpoint`.

    Raises:
        ConfigError: the checkpoint cannot be read, is of another architecture or size, or lacks weights.
    """
    loading: Any = type(model)
    try:
        if (kind := AutoConfig.from_pretrained(checkpoint).model_type) != model.config.model_type:
            raise ValueError(f"it is a {kind}, not a {model.config.model_type}")
        saved, report = loading.from_pretrained(
            checkpoint,
            config=copy.deepcopy(model.config),
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        _refuse_incomplete(report, checkpoint)
        model.load_state_dict(saved.state_dict(), strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"The checkpoint {checkpoint} does not fit the model {type(model).__name__} ({cause}): continue with the "
            "model that it was saved from, or give an earlier checkpoint."
        ) from error


def _refuse_incomplete(report: dict[str, Any], checkpoint: str) -> None:
    for kind, names in report.items():
        if names and kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            some = ", ".join(sorted(map(str, names))[:3])
            raise ConfigError(
                f"The checkpoint {checkpoint} has {len(names)} {kind.replace('_', ' ')} ({some}, …): give one that was "
                "written to the end, of the same model."
            )
