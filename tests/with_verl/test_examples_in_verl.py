import inspect
from pathlib import Path

import verl
from example_scripts import EXAMPLES, overrides
from hydra import compose, initialize_config_dir

from vgr_trl.integrations.verl.credit import compute_score
from vgr_trl.integrations.verl.inside_verl.plugin import TRAINER_MODE, read_options


def test_verl_takes_every_line(tmp_path):
    module, given = overrides(EXAMPLES / "run_vppo_qwen2_5_vl_7b.sh", tmp_path)
    assert module == "verl.trainer.main_ppo"
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", given)
    options = read_options(config)
    assert options.enable_perception_filtering
    assert (options.top_p_perception_tokens, options.trajectory_scaling_min) == (0.4, 0.9)
    assert options.use_entropy_penalty
    assert config.trainer.v1.trainer_mode == TRAINER_MODE
    reward = config.reward.custom_reward_function
    assert reward.name == compute_score.__name__
    assert set(reward.reward_kwargs) <= set(inspect.signature(compute_score).parameters)
