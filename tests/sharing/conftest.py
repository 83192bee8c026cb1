"""A tiny vision-language model with its processor and questions, for whole optimizer steps."""

import pytest
from tiny_questions import image_questions, picture, questions, tiny_vision_model


@pytest.fixture(scope="session")
def vision(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def image_rows():
    return image_questions()


@pytest.fixture(scope="session")
def mixed_rows():
    """No image in every other row."""
    return questions(lambda number: [picture(number)] if number % 2 else [])
