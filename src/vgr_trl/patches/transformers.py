"""Faults of transformers and torch's attention: each with its link, and what makes the repair removable."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, Trainer
from transformers import trainer as trainer_module

from vgr_trl.sharing.model_support import prefers_cudnn
from vgr_trl.utils import ConfigError, error_text, patched_attribute

# Old checkpoints are deleted before the new one is complete: a kill in between would leave none to continue from.


@contextmanager
def rotate_at_end() -> Iterator[None]:
    """Delete the checkpoints that transformers deletes in this block at its end."""
    postponed: list[dict[str, Any]] = []
    with patched_attribute(trainer_module, "rotate_checkpoints", lambda **options: postponed.append(options)):
        yield
    for options in postponed:
        trainer_module.rotate_checkpoints(**options)


# Weights of a vision-language model resumed under the names they were saved with.
#
# transformers saves vision-language models under other names than their parameters have. `from_pretrained` renames
# them back; the trainer's own loading does not, and then keeps the weights of the start with a warning (seen with
# transformers 5.23 and Qwen2.5-VL). Removable when `Trainer._load_from_checkpoint` renames.


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
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, report.get(kind) or ())):
                raise ValueError(f"it has {len(names)} {kind.replace('_', ' ')}: {', '.join(names[:3])}, …")
        model.load_state_dict(saved.state_dict(), strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"The checkpoint {checkpoint} does not fit the model {type(model).__name__} ({error_text(error)}): "
            "continue with the model that it was saved from, or give an earlier checkpoint."
        ) from error


# Attention by cuDNN, which `sdpa` takes first with torch 2.11 and later on Hopper and Blackwell.
#
# Where a mask is passed, as it is behind every shared prompt, and a length is 64 modulo 128, its gradient of queries
# can be NaN (pytorch#196678, trl#7181); and it builds a plan for every new shape, of which uneven lengths make several
# a step. Remove this when the oldest supported torch has the fix of the first.


def disable_cudnn_attention() -> str | None:
    """Switch it off in this process, and return a sentence that says so; None where it would not be taken."""
    if not prefers_cudnn():
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return (
        f"cuDNN's attention is off: behind shared prompts its gradients can be NaN (pytorch#196678, torch "
        f"{torch.__version__}); cudnn_attention turns it on."
    )
