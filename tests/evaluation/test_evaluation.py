import copy
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from vgr_trl.data.prompts import SYSTEM_PROMPT
from vgr_trl.demo.demo import draw_questions
from vgr_trl.errors import RewardError
from vgr_trl.evaluation import (
    CompletionGenerator,
    Evaluation,
    blank_image,
    build_conversation,
    compute_rewards,
    evaluate,
    print_scores,
)

ROWS = [
    {"problem": "what colour ?", "solution": colour, "family": family}
    for colour, family in (("red", "x"), ("blue", "y"), ("green", "y"))
]
SCRIPT = [
    ["Answer: red", "Answer: red", "Answer: blue"], ["Answer: red", "Answer: blue", "Answer: blue"],
    ["Answer: teal", "Answer: teal", "Answer: red"],
]  # fmt: skip
FOLDER = Path(__file__).parents[2] / "examples" / "lmms_eval"


class Scripted(torch.nn.Module):
    """Answers from a script: per question the greedy completion, then the sampled ones."""

    config = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: list[list[str]]) -> None:
        super().__init__()
        self.tokenizer, self.script = tokenizer, script
        self.device, self.place = torch.device("cpu"), {False: 0, True: 0}
        self.generation_config = type("Config", (), {"eos_token_id": tokenizer.eos_token_id})()

    def generate(self, input_ids, generation_config, **inputs):
        assert not self.training
        assert self.generation_config is generation_config, "the checkpoint's own settings are out of the way"
        sampled, copies = generation_config.do_sample, generation_config.num_return_sequences or 1
        assert not sampled or generation_config.top_k == 0, "transformers would sample from 50 tokens"
        start = self.place[sampled]
        self.place[sampled] = end = start + input_ids.size(0)
        chosen = slice(1, 1 + copies) if sampled else slice(1)
        texts = [text for answers in self.script[start:end] for text in answers[chosen]]
        written = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids.repeat_interleave(copies, dim=0), written], dim=1)


@pytest.fixture
def tokenizer(text_tokenizer):
    own = copy.deepcopy(text_tokenizer)
    own.add_tokens(["Answer", "colour"])
    return own


def test_rates_by_hand(tokenizer, eight_gpus):
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
    assert eight_gpus == [], "a model on a CPU"
    rows = Dataset.from_list([ROWS[0], {**ROWS[1], "solution": None}])
    result = evaluate(Scripted(tokenizer, SCRIPT), tokenizer, rows, num_samples=2, progress=False)
    assert (result.questions, result.skipped, result.accuracy) == (1, 1, 1.0)


def test_interval_unparsable_and_majority_by_hand(tokenizer):
    """1 of 3 right: Wilson's interval is 0.0615 to 0.7923. The third states no answer; B is right in 2 of 3."""

    def letters_reward(completions, solution, **kwargs):
        """The length of what is no answer to B; None, for A, is left out of the mean."""
        texts = [completion[0]["content"] for completion in completions]
        lengths = [float(len(text)) * (not text.startswith("Answer")) for text in texts]
        return [None if right == "A" else length for length, right in zip(lengths, solution, strict=True)]

    rows = [{"problem": "what ?", "choices": ["red", "blue"], "solution": letter} for letter in "BAB"]
    model = Scripted(tokenizer, [["Answer: B"], ["Answer: B"], ["what colour"]])
    result = evaluate(model, tokenizer, rows, num_samples=0, reward_funcs=[letters_reward], progress=False)
    assert result.interval == pytest.approx((0.0615, 0.7923), abs=1e-4)
    assert result.unparsable == pytest.approx(1 / 3)
    assert result.majority == pytest.approx(2 / 3)
    assert (result.blind, result.mean_at_k, result.pass_at_k) == (None, None, None)
    assert result.rewards == {"letters_reward": pytest.approx(len("what colour") / 2)}


def test_rewards_get_what_they_get_in_training(tokenizer):
    async def shown_reward(completions, images, trainer_state, log_extra, log_metric, **columns):
        log_metric("shown", 1.0)
        log_extra("shown", [1.0])
        return [float(len(shown)) for shown in images]

    rows = [{**ROWS[0], "images": [Image.new("RGB", (8, 6))] * count} for count in (1, 2)]
    records = [{"greedy": "red"}, {"greedy": "blue"}]
    assert compute_rewards([shown_reward], rows, records, tokenizer) == {"shown_reward": [1.0, 2.0]}


def test_a_reward_that_fails_stops_after_the_first_batch(tokenizer):
    model = Scripted(tokenizer, SCRIPT)
    with pytest.raises(RewardError, match="too_short"):
        evaluate(model, tokenizer, ROWS, num_samples=0, batch_size=1, reward_funcs=[too_short], progress=False)
    assert model.place[False] == 1


def too_short(completions, **columns):
    return []


def test_a_narrow_terminal_shows_whole_columns(capsys, monkeypatch):
    scores = partial(Evaluation, questions=200, k=8, accuracy=0.784, mean_at_k=0.66, pass_at_k=0.9, format=0.99,
                     format_sampled=0.98, rewards={"letters": 0.5}, blind=0.3)  # fmt: skip
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns, omitted in (("80", "pass@8, majority, unparsable, format"), ("200", None)):
        monkeypatch.setenv("COLUMNS", columns)
        print_scores({"before": scores(), "after": scores()})
        lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
        assert max(map(len, lines)) <= int(columns)
        assert sum("0.784" in line and "0.660" in line for line in lines) == 2
        assert (lines[-1] == f"A wider terminal also shows {omitted}.") == (columns == "80")


def test_a_batch_is_answered_as_its_rows_are_one_by_one(text_model, tokenizer):
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


def test_rows_with_and_without_images_share_a_batch(model_folder):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder).eval()
    writer = CompletionGenerator(model, AutoProcessor.from_pretrained(model_folder), 4)
    first, second, third = draw_questions(3, seed=3, split="test")
    rows = [first, {**second, "image": None}, third]

    def last_logits(chosen, blank=False):
        with torch.no_grad():
            inputs = writer.encode_prompts([build_conversation(row, blank, None) for row in chosen])
            return model(**inputs).logits[:, -1]

    together = last_logits(rows)
    for index, row in enumerate(rows):
        assert torch.allclose(together[index], last_logits([row])[0], atol=1e-5)
    moved = (together - last_logits(rows, blank=True)).abs().amax(dim=1)
    assert moved[0] > 1e-4 < moved[2], "a blanked image is another input"
    assert moved[1] < 1e-5, "a row without image has nothing to blank"
    blank = blank_image(Image.effect_noise((30, 20), 90))
    assert (blank.size, blank.mode, blank.getcolors()) == ((30, 20), "RGB", [(600, (128, 128, 128))])


def test_the_lmms_eval_task_gives_the_conversation_of_training_and_grades_it(tmp_path):
    task = runpy.run_path(str(FOLDER / "questions.py"))
    settings = yaml.safe_load((FOLDER / "questions.yaml").read_text(encoding="utf-8").replace("!function ", ""))
    for key in ("doc_to_visual", "doc_to_text", "doc_to_messages", "process_results"):
        assert callable(task[settings[key].removeprefix("questions.")])
    row = draw_questions(1, seed=3, split="test")[0]
    assert task["results"](row, [f"<answer>{row['solution']}</answer>"]) == {"accuracy": 1.0}
    assert task["results"](row, ["no idea"]) == {"accuracy": 0.0}
    row["problem"] = "Look: <image> " + row["problem"]
    system, user = task["messages"](row)
    assert system == {"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]}
    before, image, after = user["content"]
    assert (before, image["type"]) == ({"type": "text", "text": "Look: "}, "image")
    assert image["url"].tobytes() == row["image"].convert("RGB").tobytes()
    assert after["text"].strip().startswith(row["problem"].split("> ")[1])
    assert [message["role"] for message in task["messages"](row, {"system_prompt_file": "none"})] == ["user"]
