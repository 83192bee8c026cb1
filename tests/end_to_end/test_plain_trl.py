"""The rewards work without this library's trainer."""

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
