"""Repairs of faults in transformers and torch, each with its link and the condition under which it can be removed."""

import atexit
import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import AutoConfig, PreTrainedModel
from transformers import trainer as trainer_module

from vgr_trl.errors import ConfigError, error_text
from vgr_trl.patching import patched_attribute
from vgr_trl.sharing.attention import prefers_cudnn

# transformers deletes old checkpoints before the new one is complete: a kill in between would leave none to resume.


@contextmanager
def rotate_at_end() -> Iterator[None]:
    """Postpone the deletion of old checkpoints to the end of this block."""
    postponed: list[dict[str, Any]] = []
    with patched_attribute(trainer_module, "rotate_checkpoints", lambda **options: postponed.append(options)):
        yield
    for options in postponed:
        trainer_module.rotate_checkpoints(**options)


# Weights of a vision-language model resumed under the names they were saved with.
#
# transformers saves parameters of vision-language models under other names, and `from_pretrained` renames them back.
# The trainer's loading does not: it warns and keeps the weights of the start (seen with transformers 5.23 and
# Qwen2.5-VL). Removable when `Trainer._load_from_checkpoint` renames.


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Load the weights of a checkpoint into a model, in place.

    Raises:
        ConfigError: the checkpoint cannot be read, has another architecture or size, or lacks weights.
    """
    loading: Any = type(model)
    try:
        if (kind := AutoConfig.from_pretrained(checkpoint).model_type) != model.config.model_type:
            raise ValueError(f"it is a {kind}, not a {model.config.model_type}")
        saved, report = loading.from_pretrained(
            checkpoint,
            config=copy.deepcopy(model.config),
            dtype=reduce(
                torch.promote_types, {value.dtype for value in model.parameters() if value.is_floating_point()}
            ),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, report.get(kind) or ())):
                raise ValueError(f"it has {len(names)} {kind.replace('_', ' ')}: {', '.join(names[:3])}, …")
        model.load_state_dict(saved.state_dict(), strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"The checkpoint {checkpoint} does not fit the model {type(model).__name__} ({error_text(error)})"
        cure = "continue with the model that it was saved from, or give an earlier checkpoint"
        raise ConfigError(f"{what}: {cure}.") from error


# Attention by cuDNN, which `sdpa` takes first with torch 2.11 and later on Hopper and Blackwell.
#
# With a mask, as behind every shared prompt, and a length of 64 modulo 128, its gradient of queries can be NaN
# (pytorch#196678, trl#7181). It also plans every new shape, several per step with uneven lengths. Removable when the
# oldest supported torch has the fix of the first fault.


def disable_cudnn_attention() -> str | None:
    """Switch cuDNN's attention off in this process; return a sentence that says so, or None if it was not in use."""
    if not prefers_cudnn():
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    why = f"behind shared prompts its gradients can be NaN (pytorch#196678, torch {torch.__version__})"
    return f"cuDNN's attention is off: {why}; cudnn_attention turns it on."


# `ddp_timeout` on a CPU: transformers 5.23 does not pass it to the process group, which waits for 30 minutes.


def give_timeout(seconds: int) -> None:
    """Set the timeout of a gloo process group to `ddp_timeout`, in seconds."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        _set_pg_timeout(timedelta(seconds=seconds))


# Process groups, closed while the interpreter still runs.
#
# Gloo frees a finished collective in a thread of its own, which needs the interpreter's lock. If the interpreter has
# shut down, the thread aborts the process (`terminate called without an active exception`, pytorch/pytorch #190489). If
# another thread destroys the group with the lock held, both wait forever. The thread outlives a destroyed group to
# which DDP or DeepSpeed still refers. Removable when torch waits for the thread.

_STATUS_LINES = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_SECONDS, _MOST = 0.1, 60.0  # between two looks at the threads; in all


def close_group_at_exit() -> None:
    """Destroy the process group at a normal exit; if it was destroyed before, let gloo finish."""
    atexit.unregister(_close)
    if distributed.is_available() and distributed.is_initialized():
        atexit.register(_close)


def wait_for_gloo() -> None:
    """Release the interpreter's lock until gloo has freed the last collective, so that the group can be destroyed.

    Gloo's threads then sleep, and none wakes between two looks, as a thread does that waits for the lock. Where the
    threads are not visible, the time of two looks has to do.
    """
    before: list[str] | None = None
    for _ in range(int(_MOST / _SECONDS)):
        time.sleep(_SECONDS)
        now = _gloo_thread_states()
        if now == before and not any(line.startswith("State:") and "sleeping" not in line for line in now):
            return
        before = now


def _gloo_thread_states() -> list[str]:
    """Return state and scheduling counts of gloo's threads, on Linux."""
    states: list[str] = []
    for status in sorted(Path("/proc/self/task").glob("*/status")):
        with suppress(OSError):  # the thread has ended
            name, *lines = status.read_text().splitlines()
            if name.endswith("pt_gloo_runloop"):
                states += [line for line in lines if line.startswith(_STATUS_LINES)]
    return states


def _close() -> None:
    wait_for_gloo()
    failed = getattr(sys, "last_value", None) is not None  # a collective may then be pending forever
    if distributed.is_initialized() and not failed:
        distributed.destroy_process_group()


# Decoding with a static cache as one graph although checkpointing is on.
#
# For checkpointing with frozen weights, transformers and PEFT hook the input embeddings: their outputs require
# gradients. torch.compile ends its graph at each hook, and at each call around it: 7 graphs a token instead of 1.


@contextmanager
def without_input_gradients(model: nn.Module) -> Iterator[None]:
    """Remove the hooks by which embeddings require gradients, within this block."""
    removed = []
    for module in model.modules():
        for number, hook in [*module._forward_hooks.items()]:
            if getattr(hook, "__name__", "").startswith("make_inputs_require_grad"):
                removed.append((module._forward_hooks, number, module._forward_hooks.pop(number)))
    try:
        yield
    finally:
        for hooks, number, hook in removed:
            hooks[number] = hook
