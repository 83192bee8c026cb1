"""The examples in docstrings of the functions that users call first print what they say."""

import doctest
import logging

import pytest
import torch
from PIL import Image

from vgr_trl.credit import token_weights
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.demo.demo import draw_questions, to_dataset
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.recipes import load_recipe
from vgr_trl.rewards import accuracy_reward, vgr_reward
from vgr_trl.sampling import ReplayBuffer
from vgr_trl.sampling.replay import Group
from vgr_trl.sharing import share_prompts
from vgr_trl.signals import AttentionProbe, RolloutScorer, build_modality_masks, vision_gain_ratio
from vgr_trl.signals.ratios import special_token_ids, vision_token_ids
from vgr_trl.trainer import DAPOTrainer

SHOWN = (
    DAPOConfig, DAPOTrainer, share_prompts, RolloutScorer, AttentionProbe, accuracy_reward, vgr_reward,
    token_weights, load_recipe, ReplayBuffer,
)  # fmt: skip
KNOWN = (*SHOWN, Group, build_modality_masks, build_tiny_vlm, draw_questions, special_token_ids, to_dataset)
KNOWN += (vision_gain_ratio, vision_token_ids)


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.__qualname__)
def test_an_example_prints_what_it_says(shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)  # DeepSpeed's go to stdout
    names = {known.__name__: known for known in KNOWN} | {"Image": Image, "torch": torch}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(parser.get_doctest(shown.__doc__, names, shown.__qualname__, None, None))
    assert runner.tries > 1
    assert runner.failures == 0, capsys.readouterr().out
