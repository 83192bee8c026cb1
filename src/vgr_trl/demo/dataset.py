"""Rows of drawn questions as the trainer, and as the tokenizer, want them."""

from typing import Any

from datasets import Dataset

from vgr_trl.data.rows.text.prompts import build_prompt
from vgr_trl.demo.warm_start import target_text

Rows = list[dict[str, Any]]


def words_of(rows: Rows) -> list[str]:
    """Return the distinct texts that the model is going to read and write."""
    texts: dict[str, None] = {}
    for row in rows:
        texts[build_prompt(row["problem"], row.get("choices"), system_prompt=None)[0]["content"]] = None
        texts[target_text(row)] = None
    return list(texts)


def as_dataset(rows: Rows) -> Dataset:
    """Return the columns that the trainer and the rewards read."""
    names = [name for name in ("id", "image", "solution", "choices", "family", "source") if name in rows[0]]
    prompts = [build_prompt(row["problem"], row.get("choices"), system_prompt=None) for row in rows]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    return Dataset.from_dict({"prompt": prompts} | columns)
