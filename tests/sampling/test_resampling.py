"""Further prompts of dynamic sampling: which are drawn, how processes share them, and how a resumed run goes on."""

import pytest
from PIL import Image

from vgr_trl.rows import Placement
from vgr_trl.sampling.zero_variance import FurtherPrompts, prompt_key


class Stream:
    """Rows that can only be read from the start."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(rows(self.length))


def rows(count):
    return [{"prompt": str(number)} for number in range(count)]


def drawn(prompts, count):
    prompts._used.clear()
    return [int(row["prompt"]) for row in prompts.draw(count, Placement(4, 1))[0]]


@pytest.mark.parametrize(
    ("missing", "generations", "processes", "expected"),
    [(3, 8, 1, 3), (3, 8, 4, 3), (1, 4, 8, 2), (4, 8, 3, 6)],
)
def test_prompts_of_a_round_are_shared_equally(missing, generations, processes, expected):
    parts = []
    for process in range(processes):
        part, count = FurtherPrompts(rows(10)).draw(missing, Placement(4, generations, process, processes))
        assert count == expected
        parts.append([row["prompt"] for row in part])
    assert {len(part) * processes for part in parts} == {expected * generations}
    together = [prompt for part in parts for prompt in part]
    assert all(together[first : first + generations] == [together[first]] * generations
               for first in range(0, len(together), generations))  # fmt: skip
    assert FurtherPrompts(rows(10)).draw(11, Placement(4, generations, 0, processes))[1] <= 10


def test_each_pass_over_the_data_is_another_permutation():
    prompts = FurtherPrompts(rows(10), seed=4)
    passes = [drawn(prompts, 10) for _ in range(3)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0] != drawn(FurtherPrompts(rows(10), seed=5), 10)


@pytest.mark.parametrize("dataset", [rows(5), Stream(5)], ids=["with a length", "stream"])
def test_no_more_than_there_are(dataset):
    prompts = FurtherPrompts(dataset)
    prompts.begin(rows(4), Placement(4, 1))
    assert [row["prompt"] for row in prompts.draw(3, Placement(4, 1))[0]] == ["4"]
    assert prompts.draw(1, Placement(4, 1)) == ([], 0)


@pytest.mark.parametrize("dataset", [rows(7), Stream(7)], ids=["with a length", "stream"])
@pytest.mark.parametrize("before", [1, 7, 20])
def test_they_continue_after_an_interruption(dataset, before, tmp_path):
    whole = FurtherPrompts(dataset, seed=1)
    drawn(whole, before)
    whole.save(tmp_path)
    again = FurtherPrompts(dataset, seed=1)
    again.load(tmp_path)
    assert [drawn(again, 2), drawn(again, 5)] == [drawn(whole, 2), drawn(whole, 5)]


def test_prompts_are_the_same_if_text_and_images_are():
    image, other = Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4), "white")
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}]}]
    copy = [{"role": "user", "content": [{"type": "image", "image": image.copy()}, {"type": "text", "text": "Which?"}]}]
    assert prompt_key({"prompt": messages}) == prompt_key({"prompt": copy})
    assert prompt_key({"prompt": "Which?", "image": image}) != prompt_key({"prompt": "Which?", "image": other})
