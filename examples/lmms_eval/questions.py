"""What the task `questions` shows a model and how it judges it: as `vgr-trl evaluate` does."""

from typing import Any

from vgr_trl.data.rows.text.prompts import build_prompt
from vgr_trl.rewards import accuracy_reward


def images(row: dict[str, Any]) -> list[Any]:
    """Return the images of a row."""
    return [image.convert("RGB") for image in row.get("images") or [row["image"]]]


def text(row: dict[str, Any], options: dict[str, Any] | None = None) -> str:
    """Return the question with its choices, as training puts it."""
    (message,) = build_prompt(row["problem"], row.get("choices"), system_prompt=None)
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def results(row: dict[str, Any], completions: list[str]) -> dict[str, float | None]:
    """Return the accuracy of the completion, from which lmms-eval has taken the thought."""
    columns = {name: [row[name]] for name in ("solution", "choices") if name in row}
    return {"accuracy": accuracy_reward(completions[:1], **columns)[0]}
