"""`python -m vgr_trl.mtrl config=config.yaml a.b=c`, in place of `verl.trainer.main` or `mtrl.training.training_main`.

It starts as many processes as the configuration asks for, as EasyR1 does, unless it is among those already.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vgr_trl.cli.__main__ import main as run_command
from vgr_trl.config_converters import KEYS, in_easyr1, read_configuration
from vgr_trl.utils import ConfigError

_LAUNCHED = "VGR_TRL_LAUNCHED"  # set for the processes that are started here
_SHARDED = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp_state_dict_type", "FULL_STATE_DICT",
)  # fmt: skip
_STRATEGY = "worker.actor.fsdp.enable_full_shard"  # a switch of EasyR1, the name of a strategy in MTRL
_RESHARDS = {"TRUE": "true", "FULL_SHARD": "true", "HYBRID_SHARD": "true", "FALSE": "false", "SHARD_GRAD_OP": "false"}
_OFFLOADS = ("fsdp.enable_cpu_offload", "offload.offload_params", "offload.offload_optimizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or evaluate, as the configuration says, and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [f"--{argument}" if argument.startswith("config=") else argument for argument in given]
    is_launched = any(name in os.environ for name in (_LAUNCHED, "LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK"))
    try:
        stated, _ = read_configuration(arguments)
        values = None if stated is None else in_easyr1(stated)[0]
    except ConfigError:
        values = None
    if values is None or is_launched:  # what is wrong with a file is reported where it is converted
        return run_command(["train", *arguments])
    if (nodes := values.get("trainer.nnodes", 1)) != 1:
        return _fail(
            f"trainer.nnodes is {nodes}: start this with accelerate launch --num_machines {nodes} -m vgr_trl.mtrl on "
            "each machine."
        )
    processes = values.get("trainer.n_gpus_per_node")
    if processes is None:
        processes = max(1, min(_gpus(), int(KEYS["trainer.n_gpus_per_node"].default)))
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        return _fail(f"trainer.n_gpus_per_node is {processes!r}: give a whole number of at least 1.")
    if processes == 1 or values.get("trainer.val_only"):
        return run_command(["train", *arguments])
    if "--use_cpu" in given:
        launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    elif (gpus := _gpus()) < processes:
        return _fail(
            f"trainer.n_gpus_per_node is {processes}, but this machine has {gpus} GPUs: give "
            f"trainer.n_gpus_per_node={max(gpus, 1)}, which changes no batch, or --use_cpu."
        )
    elif (strategy := str(values.get(_STRATEGY, True)).upper()) not in (*_RESHARDS, "NO_SHARD"):
        return _fail(f"{_STRATEGY} is {values[_STRATEGY]!r}: give {', '.join(_RESHARDS)} or NO_SHARD.")
    else:
        launch = ["accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1"]
        launch += _engine(values, strategy, given)
    environment = {**os.environ, _LAUNCHED: "1", **({"ACCELERATE_USE_CPU": "true"} if "--use_cpu" in given else {})}
    command = [sys.executable, "-m", *launch, "-m", "vgr_trl.mtrl", *given]
    return subprocess.run(command, env=environment, check=False).returncode


def _engine(values: Mapping[str, Any], strategy: str, given: Sequence[str]) -> list[str]:
    """Flags of accelerate: sharded as theirs are, but by DDP where each process needs whole parameters."""
    has_critic = values.get("algorithm.adv_estimator") == "gae" and not re.search("--critic[= ]head", " ".join(given))
    if has_critic or strategy == "NO_SHARD":
        why = "A critic model is trained whole (--critic head is sharded)" if has_critic else "NO_SHARD"
        print(f"{why}: each process holds all parameters, by DDP, and nothing is offloaded.", file=sys.stderr)
        return ["--multi_gpu"]
    offloads = any(values.get(f"worker.actor.{key}") for key in _OFFLOADS)
    own = ["--fsdp_reshard_after_forward", _RESHARDS[strategy], "--fsdp_offload_params", str(offloads).lower()]
    return [*_SHARDED, *own]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
