"""A CPU among verl's platforms, by its own registry."""

import os

os.environ["VERL_PLATFORM"] = "cpu"

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def empty_cache(self):
        pass

    def communication_backend_name(self):
        return "gloo"
