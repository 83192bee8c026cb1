"""`vgr-trl env`: versions, devices and kernels, for reports of faults."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from vgr_trl import __version__
from vgr_trl.utils import ConfigError

PACKAGES = (
    "torch", "trl", "transformers", "accelerate", "peft", "datasets", "math-verify", "deepspeed", "vllm", "flash-attn",
    "bitsandbytes", "liger-kernel", "trackio", "wandb", "torchvision",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a report of a fault should hold, and return 0."""
    if argv:
        raise ConfigError(f"env takes no arguments, but got {' '.join(argv)}.")
    for name, value in describe().items():
        print(f"{name:<16}{value}")
    return 0


def describe() -> dict[str, str]:
    """Return versions of packages, and devices."""
    import torch

    found = {"vgr_trl": __version__, "Python": platform.python_version(), "system": platform.platform()}
    found |= {name: _version(name) for name in PACKAGES}
    found["CUDA"] = torch.version.cuda or "none"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
    if not torch.cuda.device_count():
        found["GPU"] = "none"
    found["CPU threads"] = str(torch.get_num_threads())
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
