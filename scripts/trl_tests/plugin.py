"""pytest plugin of `make trl-tests`: TRL's tests of GRPOTrainer run offline against another trainer and its options.

The environment variables TRAINER and CONFIG name the two classes as module:Class. HF_HOME is an empty folder, which is
filled with tiny random models under the names of the hub's; the tests themselves are unchanged.
"""

import importlib
import importlib.util
import os
import re
import sys
import types
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
import torch
import transformers
from trl import chat_template_utils, import_utils
from trl_tests import data, models, vocabularies

# TRL's own trainer fails these too: the tests are of TRL 1.10.0.dev0 (f2cd577), the installed TRL is newer.
EXCLUDED = {
    "test_generate_prefers_rollout_func": "the trainer made by hand lacks eos_token_ids, which newer TRL reads",
    "test_generate_rollout_func_syncs_vllm_weights_when_needed": "as above",
    "test_liger_kernel_with_peft_non_lm_head_target_allowed": "newer TRL needs no liger-kernel to build the trainer",
    "test_liger_kernel_with_peft_modules_to_save_lm_head_allowed": "as above",
    "test_liger_kernel_with_peft_prompt_learning_raises": "newer TRL does not refuse this",
    "test_train_moe_peft_model": "newer PEFT allows the second adapter whose absence is asserted",
    "test_entropy_bonus_flows_gradients": "newer TRL returns entropies with a gradient in both cases",
    "test_train_vlm[trl-internal-testing/tiny-Gemma4ForConditionalGeneration]": "there is no tiny model for it here",
}
HUB = Path(os.environ["HF_HOME"]) / "hub"


class TorchWithSmallIds(types.ModuleType):
    """`torch` for the test module: `tensor` translates Qwen's token ids, which some tests script."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def tensor(values, *args, **kwargs):
        made = torch.tensor(values, *args, **kwargs)
        if made.dtype != torch.int64 or made.numel() == 0 or made.max() < min(vocabularies.QWEN3.specials):
            return made
        vocabulary = vocabularies.QWEN3_5 if made.max() >= min(vocabularies.QWEN3_5.specials) else vocabularies.QWEN3
        return torch.tensor(vocabulary.translate(values), *args, **kwargs)


def pytest_configure(config):
    for marker in ("slow", "low_priority"):
        config.addinivalue_line("markers", f"{marker}: of TRL")
    transformers.utils.logging.disable_progress_bar()
    if not transformers.utils.is_torchvision_available():
        models.leave_out_video_processors()
    models.write_hub(HUB)
    # The tests ask for jmespath, which TRL uses only with a transformers that has no response templates.
    if getattr(chat_template_utils, "_SUPPORTS_RESPONSE_TEMPLATE", False):
        import_utils.is_jmespath_available = lambda: True
    answer_removed_checks(import_utils)


def answer_removed_checks(module):
    """Let a module answer each `is_X_available` that the installed TRL no longer has."""
    fallback = module.__getattr__ if hasattr(module, "__getattr__") else None

    def answer(name):
        if found := re.fullmatch(r"is_(\w+)_available", name):
            return lambda *args, **kwargs: importlib.util.find_spec(found[1]) is not None
        if fallback is not None:
            return fallback(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = answer


def load_class(variable):
    module, _, name = os.environ[variable].partition(":")
    return getattr(importlib.import_module(module), name)


def pytest_collection_modifyitems(items):
    module = sys.modules["tests.test_grpo_trainer"]
    module.GRPOTrainer, module.GRPOConfig = load_class("TRAINER"), load_class("CONFIG")
    module.load_dataset, module.torch = data.load_dataset, TorchWithSmallIds("torch")
    for item in items:
        if item.name in EXCLUDED:
            item.add_marker(pytest.mark.skip(reason=EXCLUDED[item.name]))


def pytest_runtest_setup(item):
    """Give the test that counts on an improbable end token a model with Qwen's whole vocabulary."""
    models.choose_vocabulary(HUB, whole=item.name == "test_train_with_mask_truncated_completions_all_masked")
