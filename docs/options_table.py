"""Makes the lists of docs/options.md of what the options of this library declare.

python docs/options_table.py
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vgr_trl.cli.arguments import DataArguments, RewardArguments, RunArguments
from vgr_trl.config import PERTURBATIONS
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.options import FACTS

PAGE = Path(__file__).resolve().parent / "options.md"
MADE = re.compile(r"(?<=<!-- made by docs/options_table.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Of `vgr-trl train`, where TRL's ModelConfig stands beside them.
GROUPS = (RunArguments, DataArguments, RewardArguments, DAPOConfig)
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def page() -> str:
    """Return the page with what the options declare."""
    return MADE.sub(lambda _: "\n".join([*_lines(), ""]), PAGE.read_text(encoding="utf-8"))


def _lines() -> Iterator[str]:
    for group in GROUPS:
        hints, left = get_type_hints(group), {each.name: each for each in fields(group)}
        for base in group.__mro__:
            stage = re.sub("(Options|Arguments|Config)$", "", base.__name__).lower()
            own = inspect.get_annotations(base) if base.__module__.startswith("vgr_trl.") else {}
            found = [left.pop(name) for name in own if name in left]
            if found:
                title = re.split(r"[;:(]|\.?\n|\.$", base.__doc__ or stage)[0].strip()
                yield from ("", f"## {title} (`{stage}`)", "")
            for each in found:
                default = each.default if each.default is not MISSING else each.default_factory()
                unused = _unused(each.metadata["needs"])
                about = f"{_accepted(hints[each.name], each)}; default {_value(default)}"
                why = f" *No effect where {unused}.*" if unused else ""
                yield f"- **`{each.name}`** ({about}): {each.metadata['help']}{why}"


def _value(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return str(default).lower()
    text = " ".join(map(str, default)) if isinstance(default, list) else str(default)
    return f"`{text}`" if len(text) < 40 else "a text of its own"


def _accepted(hint: Any, each: Field[Any]) -> str:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    limits = " ".join(
        f"{sign} {each.metadata[bound]:g}" for bound, sign in SIGNS.items() if each.metadata[bound] is not None
    )
    return f"{_kind(kind)} {limits}".strip()


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is list:
        return {"text": "texts", "number": "numbers", "integer": "integers"}[_kind(*get_args(kind))]
    return {bool: "true, false", int: "integer", float: "number", str: "text"}.get(kind, "JSON object")


def _unused(needs: Any) -> str:
    """When an option has no effect; `vgr_trl.options.option` says what it may need."""
    if not callable(needs):
        return " and ".join(_off(*need) for need in ({needs: True} if isinstance(needs, str) else needs or {}).items())
    quiet: dict[str, Any] = {"use_cpu": True, "bf16": False, "markdown_logs": False}
    perturbed = {
        name: DAPOConfig(perturbation=name, enable_perception_filtering=True, **quiet) for name in PERTURBATIONS
    }
    used = [f"`{name}`" for name, options in perturbed.items() if needs(options) is None]
    return needs(DAPOConfig(**quiet)) + f" by {' or '.join(used)}" * (0 < len(used) < len(perturbed))


def _off(name: str, values: Any) -> str:
    if name in FACTS:
        return FACTS[name]
    if values is True:
        return f"`{name}` is off"
    others = [choice for choice in get_args(get_type_hints(DAPOConfig)[name]) if choice not in values]
    shorter = others if len(others) < len(values) else values
    return f"`{name}` is {'not ' * (shorter is values)}{' or '.join(f'`{choice}`' for choice in shorter)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
