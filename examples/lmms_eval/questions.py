"""What the task `questions` shows a model and how it judges it: as `vgr-trl evaluate` does."""

from typing import Any

from trl.data_utils import prepare_multimodal_messages

from vgr_trl.cli.arguments import DataArguments, load_system_prompt
from vgr_trl.data.checked_rows import RowOptions, ready_row
from vgr_trl.data.prompts import build_prompt
from vgr_trl.rewards import accuracy_reward


def messages(row: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the conversation as training puts it, with its system prompt or that of `system_prompt_file`."""
    given = DataArguments(system_prompt_file=(lmms_eval_specific_kwargs or {}).get("system_prompt_file"))
    ready = ready_row(row, RowOptions(needs_solution=False, system_prompt=load_system_prompt(given)))
    conversation = prepare_multimodal_messages(ready["prompt"], ready["images"])
    return [{**message, "content": [_part(part) for part in message["content"]]} for message in conversation]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "url": part["image"]} if part["type"] == "image" else part


def images(row: dict[str, Any]) -> list[Any]:
    """Return the images of a row, for models that take no conversation."""
    return [image.convert("RGB") for image in row.get("images") or [row["image"]]]


def text(row: dict[str, Any], options: dict[str, Any] | None = None) -> str:
    """Return the question with its choices, for models that take no conversation."""
    (message,) = build_prompt(row["problem"], row.get("choices"), system_prompt=None)
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def results(row: dict[str, Any], completions: list[str]) -> dict[str, float | None]:
    """Return the accuracy of the completion, from which lmms-eval has taken the thought."""
    columns = {name: [row[name]] for name in ("solution", "choices") if name in row}
    return {"accuracy": accuracy_reward(completions[:1], **columns)[0]}
