"""`python -m vgr_trl.mtrl config=config.yaml a.b=c`, in place of `verl.trainer.main` or `mtrl.training.training_main`.

It starts as many processes as the configuration asks for, as EasyR1 does, unless it is among those already.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from vgr_trl.cli.__main__ import main as run_command
from vgr_trl.config_converters import KEYS, easyr1_name, read_configuration

_LAUNCHED = "VGR_TRL_LAUNCHED"  # set for the processes that are started here
_SHARDED = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp_reshard_after_forward", "true", "--fsdp_state_dict_type", "FULL_STATE_DICT",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or evaluate, as the configuration says, and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [f"--{argument}" if argument.startswith("config=") else argument for argument in given]
    stated, _ = read_configuration(arguments)
    is_launched = any(name in os.environ for name in (_LAUNCHED, "LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK"))
    if stated is None or is_launched:  # what is wrong with a file is reported where it is converted
        return run_command(["train", *arguments])
    values = {easyr1_name(key): value for key, value in stated.items()}
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
    else:  # sharded by accelerate, as theirs are
        launch = ["accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1", *_SHARDED]
    environment = {**os.environ, _LAUNCHED: "1", **({"ACCELERATE_USE_CPU": "true"} if "--use_cpu" in given else {})}
    command = [sys.executable, "-m", *launch, "-m", "vgr_trl.mtrl", *given]
    return subprocess.run(command, env=environment, check=False).returncode


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
