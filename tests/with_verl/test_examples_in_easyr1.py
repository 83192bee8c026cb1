from pathlib import Path

import pytest
import verl
from actor_on_cpu import hooks
from example_scripts import EXAMPLES, overrides
from omegaconf import OmegaConf
from verl.trainer.config import PPOConfig

from vgr_trl.integrations.verl.inside_easyr1 import main

STOCK = Path(verl.__file__).parents[1]


@pytest.mark.skipif(not (STOCK / "examples").exists(), reason="needs EasyR1 installed in place, with its examples")
def test_easyr1_takes_every_line(tmp_path):
    """As EasyR1's `main` reads its command line, and ours reads the rest."""
    module, given = overrides(EXAMPLES / "run_vppo_easyr1.sh", tmp_path)
    assert module == main.__name__
    theirs, own = main.split_arguments(given)
    cli = OmegaConf.from_dotlist(theirs)
    file = OmegaConf.load(STOCK / cli.pop("config"))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PPOConfig()), file, cli))
    preset, options = hooks.read_options(own, config.algorithm.adv_estimator)
    assert (preset, options.estimator) == ("vgr_vppo", "grpo")
    assert options.enable_trajectory_reweighting
    assert (options.top_p_perception_tokens, options.trajectory_scaling_min) == (0.4, 0.9)
    assert config.worker.reward.reward_function == "rewards.py:compute_scores"
    assert config.algorithm.disable_kl
