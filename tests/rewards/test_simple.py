"""The rewards of format and length, by hand from `Rewards` in definitions.md."""

from vgr_trl.rewards import get_soft_overlong_punishment, think_format_reward
from vgr_trl.rewards.functions import tag_count_reward, think_only_format_reward

WELL_FORMED = [
    "<think>a</think><answer>b</answer>", " \n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n",
    "<think>看图</think><answer>五</answer>", "<think>a < b and c > d</think> <answer>-1</answer>",
]  # fmt: skip
BADLY_FORMED = [
    "a", "<think></think><answer>b</answer>", "<think>a</think>", "<answer>b</answer><think>a</think>",
    "<think>a<answer>b</answer></think>", "<think>a</think><think>a</think><answer>b</answer>",
    "<think>a<answer>b</answer>", "<think>a</think>so<answer>b</answer>", "<think>a</think><answer>?</answer>",
    "<think>\u3164\u115f\u1160\uffa0</think><answer>b</answer>", "<THINK>a</THINK><ANSWER>b</ANSWER>",
]  # fmt: skip


def test_format():
    assert think_format_reward(WELL_FORMED) == [1.0] * len(WELL_FORMED)
    assert think_format_reward(BADLY_FORMED) == [0.0] * len(BADLY_FORMED)


def test_tags_on_lines_of_their_own_count_a_quarter_each():
    texts = {
        "<think>\nred\n</think>\n<answer>\nA\n</answer>": 1.0, "<think>\nred</think>\n<answer>\nA\n</answer>": 0.75,
        "<think>red</think><answer>A</answer>": 0.0, "<think>\n<think>\nred": 0.0, "red\n</answer>": 0.25,
    }  # fmt: skip
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert tag_count_reward(messages) == list(texts.values())


def test_overlong_worked_case():
    """Lmax = 100, c = 20: free up to 80; 85 is a quarter of the way, 90 half, 100 all of it."""
    assert get_soft_overlong_punishment(10, 0)([[1] * 10, [1] * 11]) == [0.0, -1.0]
    assert get_soft_overlong_punishment(4, 4)([[], [1], [1] * 4]) == [0.0, -0.25, -1.0]
    reward = get_soft_overlong_punishment(100, 20)
    ids = [[1] * length for length in (0, 80, 85, 90, 100, 101, 500)]
    assert reward(ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    assert reward(prompts=None, completions=None, completion_ids=ids[:1], trainer_state=None, log_extra=print) == [0.0]


def test_a_thought_and_an_answer_without_tags():
    well = ["<think>a</think>\nAnswer: B", " <think>\n1\n</think>\n\n**B**\n", "<think>a</think><answer>B</answer>"]
    badly = ["Answer: B", "<think>a</think>", "<think></think>B", "<think>a</think>!", "x <think>a</think>B",
             "<think>a</think><think>b</think>B", "<think>a"]  # fmt: skip
    assert think_only_format_reward(well + badly) == [1.0] * len(well) + [0.0] * len(badly)
