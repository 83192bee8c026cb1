"""EasyR1's worker, trainer and runner with ours in their place: what needs no GPU of it.

vLLM and what comes with it, which EasyR1 imports and a CPU lacks, are mocks; nothing of them is called.
"""

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

import cloudpickle
import numpy as np
import pytest
import torch
from verl.protocol import DataProto

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.inside_easyr1.transformers5 import put_back_moved_names
from vgr_trl.integrations.verl.seams import OF_EASYR1, check_points

MISSING = ("vllm", "qwen_vl_utils", "msgspec", "wandb")


class Mocked(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def hooks():
    finder = Mocked()
    sys.meta_path.append(finder)
    put_back_moved_names()
    check_points(OF_EASYR1, "EasyR1 at b44b311")
    from vgr_trl.integrations.verl.inside_easyr1 import hooks, registered

    registered.register()
    yield hooks
    sys.meta_path.remove(finder)


def batch():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    rewards = torch.zeros(4, 3)
    rewards[torch.arange(4), mask.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    columns = {name: torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) + 0.1
               for seed, name in enumerate(("vgr_vision", "vgr_instruction"))}  # fmt: skip
    tensors = {"token_level_rewards": rewards, "response_mask": mask, **columns}
    return DataProto.from_single_dict({**tensors, "uid": np.array(list("aabb"), dtype=object)})


def trainer(hooks, **given):
    made = object.__new__(hooks.SignalTrainer)
    made.preset, made.options = hooks.read_options(given, "grpo")
    made._weights, made._metrics = None, {}
    return made


def test_advantages_of_its_own_function(hooks):
    from verl.trainer import ray_trainer

    plain = ray_trainer.compute_advantage(batch(), "grpo").batch["advantages"]
    made = trainer(hooks, preset="vgr_token_weights")
    data = made.advantages(ray_trainer.compute_advantage, batch(), 1.0, 1.0)
    found, mask = data.batch["advantages"], data.batch["response_mask"]
    assert torch.allclose(found.sum(1), (plain * mask).sum(1), atol=1e-5)  # weights have mean 1
    assert (found - plain * mask).abs().max() > 1e-2
    assert mask.tolist() == batch().batch["response_mask"].tolist()


def test_weights_of_a_reward_on_the_mask(hooks):
    from verl.trainer import ray_trainer

    made = trainer(hooks, preset="vgr_token_weights", apply_to="mask", collect_attentions=True)
    made._weights = [[1.0, 1.0, 4.0], [3.0, 1.0], [1.0, 1.0, 1.0], [2.0]]
    data = made.advantages(ray_trainer.compute_advantage, batch(), 1.0, 1.0)
    weighted = [[0.5, 0.5, 2.0], [1.5, 0.5, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert torch.allclose(data.batch["response_mask"], torch.tensor(weighted))


def test_entropies_are_refused(hooks):
    with pytest.raises(ConfigError, match="reads entropies, which EasyR1's actor does not compute"):
        hooks.read_options({"enable_entropy_filtering": True}, "grpo")


def test_the_runner_travels_to_another_process(hooks):
    from vgr_trl.integrations.verl.inside_easyr1.main import runner_with

    runner = runner_with({"preset": "vgr_vppo"}).__ray_metadata__.modified_class
    assert runner.__mro__[1].__name__ == "Runner"
    assert len(cloudpickle.dumps(runner)) > 100
