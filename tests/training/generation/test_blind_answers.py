import pytest
import torch
from support.trainers import logged
from support.vllm import in_place_of_vllm

from vgr_trl.generation import blind_conversation, extract_description
from vgr_trl.rewards import load_reward
from vgr_trl.rewards.functions import blind_accuracy_reward


def test_descriptions():
    assert extract_description(
        "<description> a red\ncircle </description><answer>B</answer>", "description", False
    ) == ("a red\ncircle")
    assert extract_description("<see>x</see> <see>y</see>", "see", False) == "x"
    assert extract_description("<answer>B</answer>", "description", False) is None
    assert extract_description("<answer>B</answer>", "description", True) == "<answer>B</answer>"
    assert extract_description("</see> <see>x <see>y</see>", "see", False) == "x <see>y"
    assert extract_description("<see>" * 100_000, "see", False) is None, "in no more time than the text is long"


def test_what_is_asked_takes_nothing_of_a_description_for_a_place():
    (message,) = blind_conversation("D: {description} Q: {question}", "2 {description}?", "it says {question}")
    assert message == {"role": "user", "content": "D: it says {question} Q: 2 {description}?"}


def test_rewards_by_hand():
    answers = ["<answer>B</answer>", "<answer>A</answer>", None, "<answer>A</answer>"]
    columns = {"solution": ["B", "B", "B", None], "choices": [["x", "y"]] * 4, "label_idx": [None] * 4}
    assert blind_accuracy_reward(["<answer>B</answer>"] * 4, answers, **columns) == [1.0, 0.0, 0.0, None]


class Speaker:
    """In place of the model's `generate`: describes images by a word of its own, and answers without them."""

    def __init__(self, trainer):
        self.trainer, self.asked = trainer, []

    def __call__(self, input_ids, **inputs):
        tokenizer = self.trainer.processing_class.tokenizer
        self.asked.append((tokenizer.batch_decode(input_ids, skip_special_tokens=True), inputs))
        texts = []
        for row in range(len(input_ids)):
            if "pixel_values" in inputs:
                texts.append(f"<description>blue {row}</description><answer>A</answer>" if row % 2 else "no words")
            else:
                texts.append(f"<answer>{'ABCD'[row % 4]}</answer>")
        made = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
        length = max(map(len, made))
        padded = [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids in made]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


@pytest.fixture
def make(vision_trainer):
    def build(*more, **options):
        run = vision_trainer([load_reward("blind_accuracy"), *more], max_steps=1, max_completion_length=64, **options)
        run.model.generate = Speaker(run)
        return run

    return build


def test_one_more_generation_without_images(make):
    seen = []

    def noted(completions, **columns):
        seen.append(columns)
        return [0.0] * len(completions)

    run = make(noted)
    run.train()
    (_, first), (asked, second) = run.model.generate.asked
    assert "pixel_values" in first
    assert "pixel_values" not in second
    assert len(asked) == 8
    assert [f"blue {row}" in text for row, text in enumerate(asked)] == [False, True] * 4
    assert all("Question:" in text for text in asked)
    answers = list(run._logs["extra"]["blind_answers"])
    assert answers == [f"<answer>{'ABCD'[row % 4]}</answer>" if row % 2 else None for row in range(8)]
    rewards = list(run._logs["rewards"]["blind_accuracy_reward"])
    assert rewards[::2] == [0.0] * 4
    (columns,) = seen
    for row in range(1, 8, 2):
        assert columns["problem"][row].replace("<image>", "") in asked[row]
        assert all(choice in asked[row] for choice in columns["choices"][row])
        assert rewards[row] == float(columns["solution"][row] == "ABCD"[row % 4])
    assert logged(run, "blind/described") == [0.5]


def test_with_vllm_each_description_is_a_prompt_of_its_own(make, monkeypatch):
    calls = in_place_of_vllm(monkeypatch)
    make(use_vllm=True).train()
    (rows, images, num_generations), blind = calls
    assert (rows, num_generations) == (8, 4)
    assert images is not None
    assert blind == (8, None, 1)
