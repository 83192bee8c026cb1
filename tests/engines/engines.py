"""The engines of the tests of this folder, on a CPU: what starts them, and what gets at whole parameters."""

import json
from functools import partialmethod
from pathlib import Path

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType

HERE = Path(__file__).parent
VARIABLES = yaml.safe_load((HERE / "engines.yaml").read_text(encoding="utf-8").replace("HERE/", f"{HERE}/"))
SHARDED = ("zero3", "offload", "fsdp2")


def as_if_large(kind: str, folder: Path) -> dict[str, str]:
    """The variables of an engine under which ZeRO-3 keeps no parameter whole, as with a model that does not fit."""
    if kind not in ("zero3", "offload"):
        return VARIABLES[kind]
    given = json.loads((HERE / "offload.json").read_text())
    kept = ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
    given["zero_optimization"] |= {f"stage3_{name}": 0 for name in kept}
    if kind == "zero3":
        del given["zero_optimization"]["offload_optimizer"]
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(given))
    return VARIABLES["offload"] | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}


def options_of(kind: str) -> dict:
    if kind in ("one", "ddp"):
        return {}
    options = {"use_cpu": False, "ddp_backend": "gloo"}  # DeepSpeed chooses the device
    return options | ({"deepspeed": str(HERE / "zero2.json")} if kind == "zero2 file" else {})


def take_cpus_for_gpus() -> None:
    """Let accelerate shard by its FSDP2 on a CPU, where it would fall back to DDP: it asks for the kind of device."""

    def gloo(state: PartialState, *args: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def cpu(state: PartialState) -> None:
        state.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = gloo, cpu


def prepare(kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "fsdp2":
        take_cpus_for_gpus()
    elif kind == "zero2 file":  # where transformers does not hand on ddp_backend
        PartialState.__init__ = partialmethod(PartialState.__init__, backend="gloo")


def found_engine(trainer) -> str:
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        offloads = state.deepspeed_plugin.deepspeed_config["zero_optimization"].get("offload_optimizer", {})
        return "offload" if offloads.get("device", "none") != "none" else f"zero{state.deepspeed_plugin.zero_stage}"
    if trainer.is_fsdp_enabled:
        return f"fsdp{state.fsdp_plugin.fsdp_version}"
    return "ddp" if trainer.accelerator.num_processes > 1 else "one"
