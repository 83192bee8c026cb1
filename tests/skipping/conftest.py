"""The tiny models and questions of the tests of prompt sharing."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "sharing"))

from tiny_questions import image_questions, tiny_vision_model


@pytest.fixture(scope="session")
def vision(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def image_rows():
    return image_questions()
