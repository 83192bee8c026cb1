"""Options of reporting: refused before anything is trained."""

import re

import pytest

from vgr_trl import DAPOConfig
from vgr_trl.utils import ConfigError


def config(**changed):
    return DAPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rollout_log_steps": -1}, "rollout_log_steps is -1: give an integer of at least 0"),
        ({"rollout_log_steps": 2.5}, "rollout_log_steps is 2.5"),
        ({"rollout_log_samples": 0}, "rollout_log_samples is 0: give an integer of at least 1"),
        ({"rollout_log_max_megabytes": 0.5}, "rollout_log_max_megabytes is 0.5: give a number of at least 1"),
        ({"rollout_log_max_megabytes": float("nan")}, "rollout_log_max_megabytes is nan"),
        ({"prompt_preview_length": 0}, "prompt_preview_length is 0"),
        ({"completion_preview_length": -4}, "completion_preview_length is -4"),
        ({"markdown_logs": "no"}, "markdown_logs is 'no': give True or False"),
        ({"rollout_log_path": " "}, "rollout_log_path is ' ': give the path of a Markdown file"),
        ({"eval_log_path": 3}, "eval_log_path is 3"),
        ({"rollout_log_steps": 0, "rollout_log_path": "a.md"},
         "rollout_log_path is given, but rollout_log_steps is 0, so nothing is recorded"),
        ({"rollout_log_steps": 0, "colorize_output": True}, "colorize_output is given, but rollout_log_steps is 0"),
        ({"rollout_log_path": "a.md", "eval_log_path": "a.md"},
         "rollout_log_path and eval_log_path name the same file (a.md, a.md)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changed, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(**changed)


def test_defaults_record_every_ten_steps_and_none_switches_off():
    assert (config().rollout_log_steps, config().rollout_log_samples) == (10, 4)
    assert config(rollout_log_steps=0).rollout_log_steps == 0
    assert config(prompt_preview_length=None).prompt_preview_length is None
