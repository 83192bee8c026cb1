"""A plug-in of pytest: the tests of a package where TRL cannot be imported, with the installed release of transformers.

Files that import TRL are not collected. Releases of transformers before 5.17 keep the states of linear attention in
layers that cannot be continued with several tokens, and checkpoint without caches, so prompts are not shared there and
the tests that expect it are skipped.
"""

import re
import sys

import pytest
import transformers
from packaging.version import Version

sys.modules["trl"] = None  # type: ignore[assignment]

IMPORTS_TRL = re.compile(
    r"^\s*(from|import) (trl\b|support\.(tr|steps\b)|vgr_trl\.(measure|patches|rollout|trainer)\b)"
    r"|\bDAPO(Config|Trainer)\b|vision_trainer",
    re.MULTILINE,
)
IS_OLD = Version(transformers.__version__) < Version("5.17")
NEEDS_NEWER = re.compile(
    r"qwen3_5|qwen3_next|lfm2|linear_attention|test_training_passes\[checkpointing-True|test_reentrant_checkpointing"
    r"|test_processes.py::test_gradients_are_the_same"
)


def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return True if IMPORTS_TRL.search(collection_path.read_text(encoding="utf-8")) else None
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if IS_OLD and NEEDS_NEWER.search(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=f"not in transformers {transformers.__version__}"))
