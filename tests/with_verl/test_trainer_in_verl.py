import os
import subprocess
import sys

import pytest
import torch
from memory_store import Store, configuration, nested, trainer
from tensordict import NonTensorStack

from vgr_trl.credit import warn_of_padding
from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.inside_verl import plugin as ours

LENGTHS = (3, 2, 4, 1)


@pytest.fixture
def store(monkeypatch):
    store = Store([f"{prompt}_{session}_0" for prompt in "xy" for session in "01"])
    store.replace_transfer_queue(monkeypatch.setattr)
    store["response_mask"] = nested([torch.ones(length, dtype=torch.long) for length in LENGTHS])
    store["rm_scores"] = nested([[0.0] * (length - 1) + [float(row % 2)] for row, length in enumerate(LENGTHS)])
    store["uid"] = NonTensorStack("x", "x", "y", "y")
    return store


def test_weights_of_a_reward_shape_the_advantages(store):
    store["old_log_probs"] = nested([torch.zeros(length) for length in LENGTHS])
    weights = [[1.0, 3.0, 2.0], [1.0, 1.0], None, [2.0]]
    fields = [{"reward_extra_info": {} if row is None else {"token_weights": row}} for row in weights]
    store["extra_fields"] = NonTensorStack.from_list(fields)
    warn_of_padding.cache_clear()
    with pytest.warns(UserWarning, match="padded with 1 or cut"):  # the third row has none
        trainer(configuration(collect_attentions=True))._compute_advantage(store.meta, {})
    found = store["advantages"].to_padded_tensor(0)
    assert torch.allclose(found[0, :3] / found[0, 0], torch.tensor([1.0, 3.0, 2.0]))
    assert torch.allclose(found[2], found[2, 0].expand(4))


def test_options_that_verl_cannot_follow():
    with pytest.raises(ConfigError):
        ours.read_options(configuration(apply_to="mask"))
    bypassed = configuration()
    bypassed.algorithm.rollout_correction = {"bypass_mode": True}
    with pytest.raises(ConfigError):
        ours.read_options(bypassed)


def test_verl_registers_it_by_its_own_environment():
    code = (
        "import verl\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "engine = EngineRegistry.get_engine_cls('language_model', 'fsdp2')\n"
        "print(get_trainer_cls('vgr_sync').__name__, engine.__name__)\n"
    )
    plugin = {"VERL_USE_EXTERNAL_MODULES": ours.__name__, "VERL_ENGINE_VENDOR": "vgr", "VERL_ENGINE_DEVICE": "cuda"}
    environment = {**os.environ, **plugin}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split()[-2:] == ["SignalTrainer", "SignalEngine"], result.stderr[-2000:]
