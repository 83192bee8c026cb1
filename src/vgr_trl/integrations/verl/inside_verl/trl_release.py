"""verl 0.9.1 asks an installed TRL for a class with a value head, which TRL 1.16 has no more, and stops without it.

The class is patched there for critics of long ago and not used; so verl is told that there is no TRL. Removable when
verl asks for the class only where there is one.
"""

import importlib
import importlib.util


def hide_newer_trl() -> bool:
    """Let verl patch models where the installed TRL lacks the class; return whether that was needed."""
    from verl.models.transformers import monkey_patch

    if importlib.util.find_spec("trl") is None or _has_value_head():
        return False
    monkey_patch.is_trl_available = lambda: False
    return True


def _has_value_head() -> bool:
    for module in ("trl.experimental.ppo", "trl"):
        try:
            if hasattr(importlib.import_module(module), "AutoModelForCausalLMWithValueHead"):
                return True
        except ImportError:
            continue
    return False
