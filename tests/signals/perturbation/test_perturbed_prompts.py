"""Whose images are perturbed, and how often: once for each number, whatever rows share it."""

import pytest

from vgr_trl.signals.perturbation import perturbed_prompts


def conversation(*images, text="what is this"):
    """A system message as text, then a question with images in it, then an answer as text."""
    content = [{"type": "image", "image": image} for image in images]
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [*content[:1], {"type": "text", "text": text}, *content[1:]]},
        {"role": "assistant", "content": "let me see"},
    ]


@pytest.fixture
def calls():
    return []


@pytest.fixture
def perturb(calls):
    def perturbed(images, index):
        calls.append((images, index))
        return [f"{image}-{index}" for image in images]

    return perturbed


def test_rows_of_a_number_share_their_images(calls, perturb):
    first, second = conversation("a", "b"), conversation("c", text="and this")
    different, own = perturbed_prompts([first, first, second, second], [7, 7, 9, 9], perturb)
    assert different == [conversation("a-7", "b-7"), conversation("c-9", text="and this")]
    assert own == [0, 0, 1, 1]
    assert calls == [(["a", "b"], 7), (["c"], 9)]
    assert first == conversation("a", "b"), "what was given is left as it was"


def test_rows_with_numbers_of_their_own(perturb):
    prompt = conversation("a")
    different, own = perturbed_prompts([prompt, prompt, prompt], [4, 5, 4], perturb)
    assert different == [conversation("a-4"), conversation("a-5")]
    assert own == [0, 1, 0]


def test_prompts_without_images(calls, perturb):
    prompts = ["a text", conversation()]
    assert perturbed_prompts(prompts, [0, 1], perturb) == (prompts, [0, 1])
    assert calls == []
