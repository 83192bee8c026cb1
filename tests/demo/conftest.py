import pytest

from vgr_trl.demo.demo import draw_questions, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm


@pytest.fixture(scope="module")
def demo_rows():
    return draw_questions(64, seed=0, split="train")


@pytest.fixture
def tiny(demo_rows):
    return build_tiny_vlm(words_of(demo_rows), seed=0)
