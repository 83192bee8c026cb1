"""The model card of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vgr_trl.reporting.views.card.model_card import extended_card
from vgr_trl.reporting.views.card.model_use import About
from vgr_trl.training.constructed import ConstructedTrainer
from vgr_trl.training.kl import PENALTY


def rewards_of(trainer: ConstructedTrainer) -> list[str]:
    """Return the names of the rewards that a user has given."""
    return [name for name in trainer.reward_func_names if name != PENALTY]


def extend_card(trainer: ConstructedTrainer, name: str | None, data: str | None) -> None:
    """Add to the card that TRL has written: rewards, the options that were on, the papers to cite; origin and use."""
    file = Path(str(trainer.args.output_dir), "README.md")
    card = extended_card(
        file.read_text(encoding="utf-8"), trainer.args, rewards_of(trainer), about_trainer(trainer, name, data)
    )
    file.write_text(card, encoding="utf-8")


def about_trainer(trainer: ConstructedTrainer, name: str | None, data: str | None) -> About:
    """Return what a constructed `DAPOTrainer` trains, and from what."""
    args, rows = trainer.args, trainer.train_dataset
    folder = Path(str(args.output_dir)).resolve().name
    counted = hasattr(rows, "__len__") and len(rows) > 0
    return About(
        name=name or folder,
        where=args.hub_model_id or str(args.output_dir),
        base=getattr(trainer.model.config, "_name_or_path", None) or None,
        data=data,
        rows=len(rows) if counted else None,
        system=_system_prompt(rows[0]) if counted else None,
        reads_images=bool(trainer._is_vlm),
        length=args.max_completion_length or 512,
    )


def _system_prompt(row: Mapping[str, Any]) -> str | None:
    prompt = row.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if not isinstance(first, Mapping) or first.get("role") != "system":
        return None
    content = first["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
