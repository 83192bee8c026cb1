"""Write the lists of docs/options.md from the declarations of options.

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
NAMES = {int: "integer", float: "number", list[int]: "integers", list[float]: "numbers"}
PLAIN = {"≥": (0, 1), ">": (), "<": (), "≤": ()}  # bounds that are not shown
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def page() -> str:
    """Return the page with the lists."""
    return MADE.sub(lambda _: re.sub("\n{3,}", "\n\n", "\n".join([*_lists(), ""])), PAGE.read_text(encoding="utf-8"))


def _lists() -> Iterator[str]:
    """Yield a heading per group and an item per option, those with the same needs below one line that says them."""
    for group in GROUPS:
        hints, left = get_type_hints(group), {each.name: each for each in fields(group)}
        for base in group.__mro__:
            own = inspect.get_annotations(base) if base.__module__.startswith("vgr_trl.") else {}
            options = [left.pop(name) for name in own if name in left and base is not DataArguments]
            together: dict[str, list[str]] = {"": []}
            for each in options:
                values, why = _values(hints[each.name], each), _unused(each.metadata["needs"])
                text = f"- `{each.name}`{f' ({values})' * bool(values)}: {each.metadata['help']}"
                together.setdefault(_condition(why) if why else "", []).append(text)
            alone = [f"{texts[0]} {why}" for why, texts in together.items() if why and len(texts) == 1]
            if options:
                yield f"\n## {re.sub('(Options|Arguments|Config)$', '', base.__name__).lower()}\n"
            yield from [*together.pop(""), *alone]
            for why, texts in together.items():
                if len(texts) > 1:
                    yield from (f"\n{why.removesuffix('.').replace('Needs', 'Need')}:\n", *texts)
    yield ""


def _values(hint: Any, each: Field[Any]) -> str:
    """Return the default unless it is none, and accepted values that the default does not show."""
    default = each.default if each.default is not MISSING else each.default_factory()
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    if get_origin(kind) is Literal:
        others = ", ".join(f"`{choice}`" for choice in get_args(kind) if choice != default)
        return others if default is None else f"{_default(default)}; or {others}"
    name = "" if default is not None else NAMES.get(kind, "")
    limits = [
        f"{sign} {each.metadata[bound]:g}"
        for bound, sign in SIGNS.items()
        if each.metadata[bound] not in (None, *PLAIN[sign])
    ]
    accepted = f"{name} {', '.join(limits)}".strip()
    return "; ".join(part for part in ("" if default is None else _default(default), accepted) if part)


def _condition(why: str) -> str:
    """Say when an option has an effect, in the fewest words."""
    needed = [part.removesuffix(" is off") for part in why.split(" and ")]
    if all(re.fullmatch(r"`\w+`", name) for name in needed):
        return f"Needs {' or '.join(needed)}."
    _, only, perturbations = why.partition(" on perturbed images by ")
    return f"For {perturbations} only." if only else f"No effect if {why}."


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"`{text}`" if len(text) < 40 else "a text of its own"


def _unused(needs: Any) -> str:
    """Return when an option has no effect, from its `needs` (`vgr_trl.options.option`)."""
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
