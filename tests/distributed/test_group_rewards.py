"""A reward that ranks a prompt's completions, in one process or two."""

import os
import statistics

import pytest
from datasets import Dataset
from support.launching import results_of
from support.trainers import config
from transformers import AutoTokenizer, Qwen2ForCausalLM

from vgr_trl import DAPOTrainer
from vgr_trl.rewards import load_reward, needs_whole_groups


@needs_whole_groups("solution", "index")
def rank_reward(completions, solution, index, num_generations, log_extra, **kwargs):
    """Rank of each completion within its group of four, by its text."""
    assert num_generations == len(completions) == len(solution) == 4
    assert len(set(index)) == 1, "the rollout is one group of one prompt, spread over the processes"
    texts = [completion[0]["content"] for completion in completions]
    log_extra("text_seen", texts)
    return [sorted(texts).index(text) / num_generations for text in texts]


def train(model_folder, output, batch_size):
    """What three steps logged, and the rows of the last rollout."""
    scored_file = output / f"scored_{os.environ['RANK']}.py"
    scored_file.write_text(
        "def ranks(reward_inputs):\n    texts = [row['response'] for row in reward_inputs]\n"
        "    return [{'overall': sorted(texts).index(text), 'rows': len(texts)} for text in texts]\n"
    )
    colours = ["red", "blue", "green", "teal"] * 3
    questions = [[{"role": "user", "content": f"what colour is the shape ? {colour}"}] for colour in colours]
    rows = Dataset.from_dict({"prompt": questions, "solution": colours, "index": list(range(12))})
    options = config(
        output, per_device_train_batch_size=batch_size, max_steps=3, learning_rate=1e-6, max_prompt_length=64,
        reward_weights=[2.0, 0.0], early_reward_weights=[1.0, 0.0], warmup_steps=1,
    )  # fmt: skip
    rewards = [rank_reward, load_reward(f"{scored_file}:ranks")]
    model, tokenizer = (kind.from_pretrained(model_folder) for kind in (Qwen2ForCausalLM, AutoTokenizer))
    trainer = DAPOTrainer(model, rewards, options, rows, processing_class=tokenizer)
    trainer.train()
    logs = trainer._logs
    return {
        "history": [entry for entry in trainer.state.log_history if "reward" in entry],
        "completion": [completion[0]["content"] for completion in logs["completion"]],
        "text_seen": list(logs["extra"]["text_seen"]),
        "reward": list(logs["rewards"]["rank_reward"]),
        "scored": list(logs["rewards"]["ranks"]),
        "advantage": list(logs["advantages"]),
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_a_reward_sees_whole_groups_however_they_are_spread(processes, text_model, text_tokenizer, tmp_path):
    model_folder = tmp_path / "model"
    text_model.save_pretrained(model_folder)
    text_tokenizer.save_pretrained(model_folder)
    result = results_of(train, model_folder, tmp_path, 4 // processes, processes=processes)[0]
    texts = result["completion"]
    assert result["text_seen"] == texts, "each process got back its own slice, in order"
    ranks = [sorted(texts).index(text) / 4 for text in texts]
    assert result["reward"] == pytest.approx(ranks)
    assert result["scored"] == [4 * rank for rank in ranks], "a file in EasyR1's form sees the batch of all processes"
    assert len(set(ranks)) > 1
    mean, deviation = statistics.mean(ranks), statistics.stdev(ranks)
    expected = [2 * (rank - mean) / (2 * deviation + 1e-4) for rank in ranks]
    assert result["advantage"] == pytest.approx(expected, abs=1e-5)
    for entry, weight in zip(result["history"], [1.0, 2.0, 2.0], strict=True):
        assert (entry["reward/rows"], entry["reward_weights/rank_reward"]) == (4.0, weight)
        assert entry["reward"] == pytest.approx(entry["rewards/rank_reward/mean"] * weight, abs=1e-6)
        assert {"timing/generation", "timing/reward", "timing/update", "timing/optimizer"} <= set(entry)
        assert entry["perf/samples_per_second"] * entry["step_time"] == pytest.approx(4)
