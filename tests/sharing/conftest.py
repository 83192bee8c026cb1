"""A tiny vision-language model with its processor and questions, for whole optimizer steps."""

import pytest
from support.models.tiny_questions import image_rows, picture, questions, vision  # noqa: F401


@pytest.fixture(scope="session")
def mixed_rows():
    """No image in every other row."""
    return questions(lambda number: [picture(number)] if number % 2 else [])
