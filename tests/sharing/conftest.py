"""A tiny vision-language model with its processor and questions, for whole optimizer steps."""

from support.models.tiny_questions import image_rows, vision  # noqa: F401
