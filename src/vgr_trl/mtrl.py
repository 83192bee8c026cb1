"""`python -m vgr_trl.mtrl config=config.yaml a.b=c`, in place of `verl.trainer.main` or `mtrl.training.training_main`.

It starts as many processes as the configuration asks for, as EasyR1 does, unless it is among those already.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vgr_trl.cli.__main__ import main as run_command
from vgr_trl.config_converters import KEYS, easyr1_name, flat

_LAUNCHED = "VGR_TRL_LAUNCHED"  # set for the processes that are started here
_SHARDED = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp_reshard_after_forward", "true", "--fsdp_state_dict_type", "FULL_STATE_DICT",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or evaluate, as the configuration says, and return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [f"--{argument}" if argument.startswith("config=") else argument for argument in given]
    processes = _processes(arguments)
    if processes > 1 and not _is_launched():
        return _launch(processes, given)
    return run_command(["train", *arguments])


def _processes(arguments: Sequence[str]) -> int:
    """Processes that the configuration asks for on this machine, or GPUs there are where it does not say; 1 where it
    cannot be read, which is reported later."""
    values: dict[str, Any] = {"nnodes": 1, "val_only": False, "n_gpus_per_node": None}
    stated = _read(arguments)
    if stated is None:
        return 1
    for key, value in {**stated, **_overrides(arguments)}.items():
        name = easyr1_name(key).removeprefix("trainer.")
        if name in values:
            values[name] = value
    if values["nnodes"] != 1 and not _is_launched():
        print(
            f"trainer.nnodes is {values['nnodes']}: start this with accelerate launch --num_machines "
            f"{values['nnodes']} -m vgr_trl.mtrl on each machine.",
            file=sys.stderr,
        )
        raise SystemExit(1)
    if values["val_only"] or (values["n_gpus_per_node"] is None and _is_launched()):
        return 1
    processes = _gpus_by_default() if values["n_gpus_per_node"] is None else values["n_gpus_per_node"]
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        print(f"trainer.n_gpus_per_node is {processes!r}: give a whole number of at least 1.", file=sys.stderr)
        raise SystemExit(1)
    return processes


def _gpus_by_default() -> int:
    import torch

    return max(1, min(torch.cuda.device_count(), int(KEYS["trainer.n_gpus_per_node"].default)))


def _read(arguments: Sequence[str]) -> dict[str, Any] | None:
    """What the file of `config` states, None if it cannot be read."""
    file = next((argument.split("=", 1)[1] for argument in arguments if argument.startswith("--config=")), None)
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8-sig")) if file else {}
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return flat(content) if isinstance(content, dict) else {}


def _overrides(arguments: Sequence[str]) -> dict[str, Any]:
    pairs = (argument.split("=", 1) for argument in arguments if re.match(r"\+{0,2}\w+(\.\w+)+=", argument))
    return {key.lstrip("+"): yaml.safe_load(value) for key, value in pairs if re.fullmatch(r"[\w.+-]+", value)}


def _is_launched() -> bool:
    return any(name in os.environ for name in (_LAUNCHED, "LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK"))


def _launch(processes: int, given: list[str]) -> int:
    """Start the processes, sharded by accelerate where there are GPUs, as EasyR1's are."""
    environment = {**os.environ, _LAUNCHED: "1"}
    if "--use_cpu" in given:
        launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        environment["ACCELERATE_USE_CPU"] = "true"
    else:
        import torch

        if (there := torch.cuda.device_count()) < processes:
            print(
                f"trainer.n_gpus_per_node is {processes}, but this machine has {there} GPUs: give "
                f"trainer.n_gpus_per_node={max(there, 1)}, which changes no batch, or --use_cpu.",
                file=sys.stderr,
            )
            return 1
        launch = ["accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1", *_SHARDED]
    command = [sys.executable, "-m", *launch, "-m", "vgr_trl.mtrl", *given]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
