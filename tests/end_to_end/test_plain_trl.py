"""The rewards work without this library's trainer."""

import os
import subprocess
import sys

import pytest
from support.trainers import STOCK

from vgr_trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward


def test_rewards_in_trls_trainer(text_trainer):
    rewards = [accuracy_reward, think_format_reward, get_soft_overlong_punishment(6, 2)]
    trainer = text_trainer(rewards, classes=STOCK, max_steps=1)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["rewards/accuracy_reward/mean"] == 0.0, "a random model states no answer"
    assert logged["rewards/think_format_reward/mean"] == 0.0
    assert -1.0 <= logged["rewards/soft_overlong_punishment_reward/mean"] <= 0.0


@pytest.mark.slow
def test_rewards_by_dotted_path_in_trls_command(text_model, text_tokenizer, text_rows, tmp_path):
    model, data = tmp_path / "model", tmp_path / "data"
    text_model.save_pretrained(model)
    text_tokenizer.save_pretrained(model)
    data.mkdir()
    text_rows.to_parquet(data / "train.parquet")
    flags = (
        f"--model_name_or_path {model} --dataset_name {data} --output_dir {tmp_path / 'run'} --use_cpu --bf16 false "
        "--reward_funcs vgr_trl.rewards.accuracy_reward vgr_trl.rewards.think_format_reward --num_generations 4 "
        "--max_completion_length 6 --max_steps 1 --logging_steps 1 --report_to none --save_strategy no"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trl.scripts.grpo", *flags.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rewards/accuracy_reward/mean" in done.stdout
    assert "rewards/think_format_reward/mean" in done.stdout
