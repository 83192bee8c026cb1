import cloudpickle
import numpy as np
import pytest
import torch
from actor_on_cpu import hooks, trainer
from verl.protocol import DataProto

from vgr_trl.errors import ConfigError


def batch():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    rewards = torch.zeros(4, 3)
    rewards[torch.arange(4), mask.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    columns = {name: torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) + 0.1
               for seed, name in enumerate(("vgr_vision", "vgr_instruction"))}  # fmt: skip
    tensors = {"token_level_rewards": rewards, "response_mask": mask, **columns}
    return DataProto.from_single_dict({**tensors, "uid": np.array(list("aabb"), dtype=object)})


def test_weights_of_a_reward_on_the_mask():
    from verl.trainer import ray_trainer

    made = trainer(preset="vgr_token_weights", apply_to="mask", collect_attentions=True)
    weights = [[1.0, 1.0, 4.0], [3.0, 1.0], [1.0, 1.0, 1.0], [2.0]]
    assert made.take_token_weights({"overall": [1.0], "token_weights": weights}) == {"overall": [1.0]}
    assert made.take_token_weights({"pg_loss": [2.0]}) == {"pg_loss": [2.0]}  # of another call
    data = made.compute_advantages(ray_trainer.compute_advantage, batch(), adv_estimator="grpo", gamma=1.0, lam=1.0)
    weighted = [[0.5, 0.5, 2.0], [1.5, 0.5, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert torch.allclose(data.batch["response_mask"], torch.tensor(weighted))


def test_weights_of_rows_that_were_filtered():
    made = trainer(preset="vgr_token_weights")
    made.config.algorithm.online_filtering = True
    assert made.take_token_weights({"overall": [1.0], "token_weights": [[1.0]] * 8}) == {"overall": [1.0]}
    with pytest.raises(ConfigError):
        hooks.read_options({"preset": "vgr_token_weights", "collect_attentions": True}, "grpo", filters=True)
    with pytest.raises(ConfigError):
        hooks.read_options({"enable_entropy_filtering": True}, "grpo")


def test_the_runner_travels_to_another_process():
    from vgr_trl.integrations.verl.inside_easyr1.main import make_runner

    runner = make_runner({"preset": "vgr_vppo"}).__ray_metadata__.modified_class
    assert runner.__mro__[1].__name__ == "Runner"
    assert len(cloudpickle.dumps(runner)) > 100
