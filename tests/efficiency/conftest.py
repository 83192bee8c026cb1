"""The tiny models and questions of the tests of prompt sharing."""

from support.models.tiny_questions import image_rows, vision  # noqa: F401
