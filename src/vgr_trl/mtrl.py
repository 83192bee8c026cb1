"""`python -m vgr_trl.mtrl config=config.yaml a.b=c`, in place of `verl.trainer.main` or `mtrl.training.training_main`.

Like EasyR1, it starts as many processes as the configuration asks for, unless a launcher has started it.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vgr_trl.cli.__main__ import main as run_command
from vgr_trl.config_converters import Conversion, convert, read_configuration
from vgr_trl.errors import ConfigError

_LAUNCHED_VARIABLE = "VGR_TRL_LAUNCHED"  # set in the processes that this module starts
_FSDP_FLAGS = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp_state_dict_type", "FULL_STATE_DICT",
)  # fmt: skip
_NODES_KEY, _GPUS_KEY = "trainer.nnodes", "trainer.n_gpus_per_node"
_STRATEGY_KEY = "worker.actor.fsdp.enable_full_shard"  # a bool in EasyR1, the name of a strategy in MTRL
_RESHARD_FLAGS = dict.fromkeys(("TRUE", "FULL_SHARD", "HYBRID_SHARD"), "true")
_RESHARD_FLAGS |= dict.fromkeys(("FALSE", "SHARD_GRAD_OP"), "false")
_OFFLOAD_KEYS = ("fsdp.enable_cpu_offload", "offload.offload_params", "offload.offload_optimizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Train or evaluate as configured, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = [f"--{argument}" if argument.startswith("config=") else argument for argument in words]
    is_launched = any(name in os.environ for name in (_LAUNCHED_VARIABLE, "LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK"))
    try:
        stated, kept = read_configuration(arguments)
        command = None if stated is None or is_launched else _build_launch_command(stated, kept, words)
        if stated is None and not any(argument.startswith(("--config", "--help", "-h")) for argument in arguments):
            raise ConfigError("config= is missing: give config=FILE.yaml, a configuration of EasyR1 or MTRL.")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if command is None:
        return run_command(["train", *arguments])
    environment = {**os.environ, _LAUNCHED_VARIABLE: "1"}
    if "--use_cpu" in words:
        environment["ACCELERATE_USE_CPU"] = "true"
    return launch(command, environment)


def launch(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command, to which SIGTERM is handed on, so that its processes save; return its exit status."""
    with subprocess.Popen(command, env=environment) as launched:
        before = signal.signal(signal.SIGTERM, lambda number, frame: launched.send_signal(number))
        try:
            return launched.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def _build_launch_command(stated: Mapping[str, Any], flags: Sequence[str], words: Sequence[str]) -> list[str] | None:
    """Return the command that starts the processes, or None if this process is enough.

    Args:
        stated: the configuration.
        flags: the flags beside it.
        words: all arguments, which the processes get.

    Raises:
        ConfigError: a key would stop the processes, this machine has too few GPUs, there are several nodes, or a GPU
            cannot hold policy and critic.
    """
    conversion, names = convert(stated), {flag.partition("=")[0] for flag in flags}
    nodes, processes = conversion.read_integer(_NODES_KEY), conversion.read_integer(_GPUS_KEY)
    gpus, on_cpu, evaluates = torch.cuda.device_count(), "--use_cpu" in words, bool(conversion["trainer.val_only"])
    if _GPUS_KEY not in conversion.stated:
        processes = max(1, min(gpus, processes))
    if on_cpu and nodes == 1:  # a divisor, so that batches can still be shared evenly
        processes = max(n for n in range(1, (os.cpu_count() or 1) + 1) if processes % n == 0)
    is_one, problem = evaluates or nodes * processes == 1, ""
    if not (is_one or (on_cpu and nodes == 1)) and gpus < processes:
        cure = f"{max(gpus, 1)}, which keeps the batch sizes, or --use_cpu"
        problem = f"{conversion.name(_GPUS_KEY)} is {processes}, but this machine has {gpus} GPUs: give {cure}."
    conversion.check(names, evaluates, problem)
    if is_one:
        return None
    if on_cpu and nodes == 1:
        launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    else:
        launch = ["accelerate.commands.launch", "--num_processes", str(nodes * processes), "--num_machines", str(nodes)]
        launch += _choose_engine_flags(conversion, words)
    command = ["-m", "vgr_trl.mtrl", *words]
    if nodes > 1:
        raise ConfigError(
            f"{conversion.name(_NODES_KEY)} is {nodes}: start this on each machine, with the address of "
            f"the first for ADDRESS and 0 to {nodes - 1} for RANK: accelerate launch --main_process_ip ADDRESS "
            f"--main_process_port 29500 --machine_rank RANK {shlex.join([*launch[1:], *command])}"
        )
    return [sys.executable, "-m", *launch, *command]


def _choose_engine_flags(keys: Conversion, words: Sequence[str]) -> list[str]:
    """Return accelerate flags: FSDP with the configured sharding, or DDP if each process needs all parameters."""
    strategy, accepted = str(keys[_STRATEGY_KEY]).upper(), (*_RESHARD_FLAGS, "NO_SHARD")
    if strategy not in accepted:
        raise ConfigError(f"{keys.name(_STRATEGY_KEY)} is {keys[_STRATEGY_KEY]!r}: give {', '.join(accepted)}.")
    has_critic = keys["algorithm.adv_estimator"] == "gae" and not re.search("--critic[= ]head", " ".join(words))
    if has_critic or strategy == "NO_SHARD":
        if has_critic and not keys["worker.actor.model.lora.rank"]:
            _refuse_large_critic(keys)
        why = "A critic model is not sharded (--critic head is)" if has_critic else "NO_SHARD"
        print(f"{why}: using DDP, so each process holds all parameters and nothing is offloaded.", file=sys.stderr)
        return ["--multi_gpu"]
    offloads = any(keys[f"worker.actor.{key}"] for key in _OFFLOAD_KEYS)
    reshard = ["--fsdp_reshard_after_forward", _RESHARD_FLAGS[strategy]]
    return [*_FSDP_FLAGS, *reshard, "--fsdp_offload_params", str(offloads).lower()]


def _refuse_large_critic(keys: Conversion) -> None:
    """Raise `ConfigError` if weights, gradients and moments of policy and critic exceed the memory of a GPU."""
    from vgr_trl.cli.evaluate import count_parameters  # imports transformers, which takes seconds

    name, bytes_each = str(keys.options["model_name_or_path"]), 16 if keys.options["dtype"] == "float32" else 8
    parameters, memory = count_parameters(name), torch.cuda.get_device_properties(0).total_memory
    if (needed := 2 * bytes_each * parameters) > memory:
        total = f"2 x {bytes_each} bytes x {parameters / 1e9:.1f} billion parameters = {needed / 2**30:.0f} GiB"
        raise ConfigError(f"Critic and policy: {total}, but a GPU has {memory / 2**30:.0f} GiB: use --critic head.")


if __name__ == "__main__":
    sys.exit(main())
