"""The example's overrides, composed with verl's own configuration."""

import os
import subprocess
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir

from vgr_trl.integrations.verl.inside_verl.trainer import read_options

SCRIPT = Path(__file__).parents[2] / "examples" / "verl" / "run_vppo_qwen2_5_vl_7b.sh"


def test_verl_takes_every_line(tmp_path):
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\n[ "$1" = -c ] && { echo rewards.py; exit; }\nprintf "%s\\n" "${@:3}"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True, check=True)
    overrides = said.stdout.splitlines()
    assert len(overrides) > 40
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides)
    options = read_options(config)
    assert options.enable_perception_filtering
    assert (options.top_p_perception_tokens, options.trajectory_scaling_min) == (0.4, 0.9)
    assert options.use_entropy_penalty
