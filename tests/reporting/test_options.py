"""Options of reporting: refused before anything is trained."""

from vgr_trl import DAPOConfig


def config(**changed):
    return DAPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **changed)


def test_defaults_record_every_ten_steps_and_none_switches_off():
    assert (config().rollout_log_steps, config().rollout_log_samples) == (10, 4)
    assert config(rollout_log_steps=0).rollout_log_steps == 0
    assert config(prompt_preview_length=None).prompt_preview_length is None
