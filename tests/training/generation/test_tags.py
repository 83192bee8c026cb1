"""Tags that are special tokens of a model, which TRL decodes to nothing."""

import copy

import pytest
from datasets import load_dataset
from support import trainers
from transformers import AutoProcessor
from trl import GRPOTrainer

from vgr_trl.evaluation import CompletionGenerator

TEXT = "<think>red</think><answer>A</answer>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.fixture
def special(model_folder, tmp_path):
    """The folder of a processor with tags among its special tokens."""
    processor = AutoProcessor.from_pretrained(model_folder)
    kept = processor.tokenizer.special_tokens_map.get("extra_special_tokens", [])
    processor.tokenizer.add_special_tokens({"extra_special_tokens": [*kept, *TAGS]})
    processor.save_pretrained(tmp_path / "special")
    return tmp_path / "special"


@pytest.mark.parametrize(("reads", "expected"), [("format", TEXT), ("system prompt", TEXT), ("nothing", "redA")])
def test_rewards_see_tags_that_are_named(special, model_folder, question_files, tmp_path, monkeypatch, reads, expected):
    seen = []

    def own(completions, **columns):
        seen.extend(completion[0]["content"] for completion in completions)
        return [float(number) for number in range(len(completions))]

    def generate(trainer, prompt_ids, *args, **kwargs):
        ids = [*trainer._tokenizer(TEXT)["input_ids"], trainer._tokenizer.eos_token_id]
        return [ids] * len(prompt_ids), None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    file = trainers.train_file(question_files)
    rows = trainers.prompts(file)
    if reads == "system prompt":  # the default one
        rows = load_dataset("parquet", data_files=file, split="train")
    rewards = ["format", own] if reads == "format" else [own]
    options = trainers.config(tmp_path / "run", max_steps=1, max_completion_length=16)
    model = trainers.tiny_model(model_folder)
    trainer = trainers.vision_trainer(special, rewards, options, rows, model=model)
    assert trainer._tokenizer.decode(trainer._tokenizer(TEXT)["input_ids"], skip_special_tokens=True) == "redA"
    trainer.train()
    assert set(seen) == {expected}
    if reads == "format":
        (logged,) = (entry for entry in trainer.state.log_history if "reward" in entry)
        assert logged["rewards/think_format_reward/mean"] == 1


def test_evaluation_reads_them_too(special, model_folder, monkeypatch):
    processor, model = AutoProcessor.from_pretrained(special), trainers.tiny_model(model_folder)
    inputs = {"input_ids": processor.tokenizer(["red"], return_tensors="pt")["input_ids"]}
    written = processor.tokenizer(["red" + TEXT], return_tensors="pt")["input_ids"]
    monkeypatch.setattr(model, "generate", lambda **given: copy.deepcopy(written))
    assert CompletionGenerator(model, processor, 8).generate(inputs, do_sample=False) == [TEXT]
