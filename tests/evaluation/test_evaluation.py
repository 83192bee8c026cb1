import copy
from functools import partial

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from vgr_trl.demo.demo import draw_questions
from vgr_trl.evaluation import Writer, blank_image, conversation_of, evaluate, majority, wilson
from vgr_trl.rewards import mdi_reward
from vgr_trl.utils import ConfigError, DataError, RewardError


class Scripted(torch.nn.Module):
    """Answers from a script: per question the greedy completion, then the sampled ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: list[list[str]]) -> None:
        super().__init__()
        self.tokenizer, self.script, self.asked = tokenizer, script, 0
        self.device = torch.device("cpu")
        self.generation_config = type("Config", (), {"eos_token_id": tokenizer.eos_token_id})()

    def generate(self, input_ids, generation_config, **inputs):
        assert not self.training
        assert self.generation_config is generation_config, "the checkpoint's own settings are out of the way"
        do_sample = generation_config.do_sample
        num_return_sequences = generation_config.num_return_sequences or 1
        count = input_ids.size(0)
        texts = [
            text
            for answers in self.script[self.asked : self.asked + count]
            for text in (answers[1 : 1 + num_return_sequences] if do_sample else answers[:1])
        ]
        if do_sample:
            self.asked += count
        written = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        prompts = input_ids.repeat_interleave(num_return_sequences if do_sample else 1, dim=0)
        return torch.cat([prompts, written], dim=1)


ROWS = [
    {"problem": "what colour ?", "solution": "red", "family": "x"},
    {"problem": "what colour ?", "solution": "blue", "family": "y"},
    {"problem": "what colour ?", "solution": "green", "family": "y"},
]
SCRIPT = [
    ["Answer: red", "Answer: red", "Answer: blue"],
    ["Answer: red", "Answer: blue", "Answer: blue"],
    ["Answer: teal", "Answer: teal", "Answer: red"],
]


@pytest.fixture
def tokenizer(text_tokenizer):
    own = copy.deepcopy(text_tokenizer)
    own.add_tokens(["Answer", "colour"])
    return own


def test_rates_by_hand(tokenizer):
    """Greedy right: 1 of 3. Sampled right: 1/2, 2/2, 0/2, mean 1/2. At least one right: 2 of 3."""
    model = Scripted(tokenizer, SCRIPT).train()
    result = evaluate(model, tokenizer, ROWS, num_samples=2, batch_size=2, group_by="family", progress=False)
    assert (result.questions, result.k, result.skipped) == (3, 2, 0)
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.mean_at_k == pytest.approx(0.5)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert (result.format, result.format_sampled) == (0.0, 0.0)
    assert (result.groups["x"].accuracy, result.groups["x"].mean_at_k) == (1.0, 0.5)
    assert (result.groups["y"].accuracy, result.groups["y"].mean_at_k, result.groups["y"].questions) == (0.0, 0.5, 2)
    assert [record["greedy"] for record in result.records] == ["Answer : red", "Answer : red", "Answer : teal"]
    assert model.training, "the mode of the model is restored"


def test_interval_unparsable_and_majority_by_hand(tokenizer):
    """1 of 3 right: Wilson's interval is 0.0615 to 0.7923. The third says nothing; B is right in 2 of 3."""
    rows = [{"problem": "what ?", "choices": ["red", "blue"], "solution": letter} for letter in "BAB"]
    script = [["Answer: B"], ["Answer: B"], ["what colour"]]
    model = Scripted(tokenizer, script)
    model.generate = partial(greedy_only, model)
    result = evaluate(model, tokenizer, rows, num_samples=0, reward_funcs=[letters_reward], progress=False)
    assert result.interval == pytest.approx((0.0615, 0.7923), abs=1e-4)
    assert result.unparsable == pytest.approx(1 / 3)
    assert result.majority == pytest.approx(2 / 3)
    assert result.blind is None
    assert result.rewards == {"letters_reward": pytest.approx(len("what colour") / 2)}


def greedy_only(model, input_ids, generation_config, **inputs):
    texts = [answers[0] for answers in model.script[: input_ids.size(0)]]
    written = model.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return torch.cat([input_ids, written], dim=1)


def letters_reward(completions, solution, **kwargs):
    """Of those whose right answer is B; None is left out of the mean."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        None if right == "A" else float(len(text)) * (not text.startswith("Answer"))
        for text, right in zip(texts, solution, strict=True)
    ]


def test_majority_counts_letters_and_texts_apart():
    answers = [("letter", 0), ("letter", 0), ("letter", 1), ("text", "red"), ("text", "blue"), None]
    assert majority(answers) == pytest.approx((2 + 1) / 6)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_a_reward_that_needs_attention_is_refused_before_generation(tokenizer):
    with pytest.raises(RewardError, match="mdi_reward cannot be called with what is passed to it"):
        evaluate(Scripted(tokenizer, SCRIPT), tokenizer, ROWS, reward_funcs=[mdi_reward])


def test_greedy_only_and_a_data_set(tokenizer):
    model = Scripted(tokenizer, SCRIPT)
    result = evaluate(model, tokenizer, Dataset.from_list(ROWS[:1]), num_samples=0, progress=False)
    assert (result.accuracy, result.mean_at_k, result.pass_at_k) == (1.0, None, None)
    assert "records" not in result.to_dict()
    assert result.to_dict(records=True)["records"][0]["problem"] == "what colour ?"


def test_rows_without_solution_are_counted_not_scored(tokenizer):
    rows = [ROWS[0], {**ROWS[1], "solution": None}]
    result = evaluate(Scripted(tokenizer, SCRIPT), tokenizer, rows, num_samples=2, progress=False)
    assert (result.questions, result.skipped, result.accuracy) == (1, 1, 1.0)


def test_rows_that_cannot_be_evaluated(tokenizer):
    for rows, more, message in (
        ([], {}, "evaluate got no rows"),
        ([{"problem": "what ?"}], {}, "None of the 1 rows has a usable solution"),
        (ROWS, {"blank_images": True}, "needs images"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate(Scripted(tokenizer, SCRIPT), tokenizer, rows, num_samples=0, progress=False, **more)


@pytest.mark.parametrize(
    ("option", "value"), [("num_samples", -1), ("batch_size", 0), ("max_completion_length", 0), ("temperature", 0.0)]
)
def test_options_out_of_range(tokenizer, option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value}: give"):
        evaluate(Scripted(tokenizer, SCRIPT), tokenizer, ROWS, **{option: value})
    with pytest.raises(ConfigError, match="group_by is 'famly': give one of the columns problem, solution, family"):
        evaluate(Scripted(tokenizer, SCRIPT), tokenizer, ROWS, group_by="famly")


def test_a_batch_is_answered_as_its_rows_are_one_by_one(text_model, tokenizer):
    """Whatever side the tokenizer pads on, and whatever the checkpoint would prefer to generate with."""
    tokenizer.padding_side = "right"
    text_model.generation_config = GenerationConfig(
        num_beams=3, no_repeat_ngram_size=1, min_p=0.5, do_sample=True, eos_token_id=tokenizer.eos_token_id
    )
    rows = [{"problem": text, "solution": "red"} for text in ("red", "what colour is the shape ?", "blue : teal")]
    settings = {"num_samples": 0, "max_completion_length": 7, "system_prompt": None, "progress": False}
    together = evaluate(text_model, tokenizer, rows, **settings)
    alone = [evaluate(text_model, tokenizer, [row], **settings).records[0]["greedy"] for row in rows]
    assert [record["greedy"] for record in together.records] == alone
    assert len(set(alone)) > 1, "the prompts matter"
    assert text_model.generation_config.num_beams == 3, "the checkpoint's settings are put back"
    expected = text_model(**Writer(text_model, tokenizer, 1).prompt(["red"])).logits[0, -1].argmax().item()
    first = Writer(text_model, tokenizer, 1).greedy(Writer(text_model, tokenizer, 1).prompt(["red"]))
    assert first == [tokenizer.decode([expected], skip_special_tokens=True)]


def test_rows_with_and_without_images_share_a_batch(model_folder):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder).eval()
    writer = Writer(model, AutoProcessor.from_pretrained(model_folder), 4)
    first, second, third = draw_questions(3, seed=3, split="test")
    rows = [first, {**second, "image": None}, third]

    def last_logits(chosen, blank=False):
        with torch.no_grad():
            return model(**writer.prompt([conversation_of(row, blank, None) for row in chosen])).logits[:, -1]

    together = last_logits(rows)
    for index, row in enumerate(rows):
        assert torch.allclose(together[index], last_logits([row])[0], atol=1e-5)
    moved = (together - last_logits(rows, blank=True)).abs().amax(dim=1)
    assert moved[0] > 1e-4 < moved[2], "a blanked image is another input"
    assert moved[1] < 1e-5, "a row without image has nothing to blank"


def test_a_blank_image_shows_nothing():
    blank = blank_image(Image.effect_noise((30, 20), 90))
    assert (blank.size, blank.mode, blank.getcolors()) == ((30, 20), "RGB", [(600, (128, 128, 128))])
