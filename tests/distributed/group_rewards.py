"""Run by test_group_rewards.py in one or two processes: three steps with a reward that ranks a prompt's completions."""

import os

from datasets import Dataset
from support.trainers import config
from transformers import AutoTokenizer, Qwen2ForCausalLM

from vgr_trl import DAPOTrainer
from vgr_trl.rewards import load_reward, needs_whole_groups


@needs_whole_groups("solution", "index")
def rank_reward(completions, solution, index, num_generations, log_extra, **kwargs):
    """Rank of each completion within its group of four, by its text."""
    assert num_generations == 4
    assert len(completions) == len(solution) == 4
    assert len(set(index)) == 1, "the rollout is one group of one prompt, spread over the processes"
    texts = [completion[0]["content"] for completion in completions]
    log_extra("text_seen", texts)
    return [sorted(texts).index(text) / num_generations for text in texts]


def train(model_folder, output, batch_size):
    """What the steps logged, and the rows of the last rollout."""
    scored_file = output / f"scored_{os.environ['RANK']}.py"
    scored_file.write_text(
        "def ranks(reward_inputs):\n    texts = [row['response'] for row in reward_inputs]\n"
        "    return [{'overall': sorted(texts).index(text), 'rows': len(texts)} for text in texts]\n"
    )
    colours = ["red", "blue", "green", "teal"]
    rows = Dataset.from_dict(
        {
            "prompt": [
                [{"role": "user", "content": f"what colour is the shape ? {colours[i % 4]}"}] for i in range(12)
            ],
            "solution": [colours[i % 4] for i in range(12)],
            "index": list(range(12)),
        }
    )
    trainer = DAPOTrainer(
        Qwen2ForCausalLM.from_pretrained(model_folder),
        [rank_reward, load_reward(f"{scored_file}:ranks")],
        config(
            output,
            per_device_train_batch_size=batch_size,
            max_steps=3,
            learning_rate=1e-6,
            max_prompt_length=64,
            reward_weights=[2.0, 0.0],
            early_reward_weights=[1.0, 0.0],
            warmup_steps=1,
        ),
        rows,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    trainer.train()
    wanted = (
        "rewards/rank_reward/mean",
        "reward",
        "reward_weights/rank_reward",
        "perf/samples_per_second",
        "step_time",
        "reward/rows",
    )
    history = [
        {key: entry[key] for key in wanted}
        | {"timings": {key: value for key, value in entry.items() if key.startswith("timing/")}}
        for entry in trainer.state.log_history
        if "reward" in entry
    ]
    rows_of_last_rollout = {
        "completion": [completion[0]["content"] for completion in trainer._logs["completion"]],
        "text_seen": list(trainer._logs["extra"]["text_seen"]),
        "reward": list(trainer._logs["rewards"]["rank_reward"]),
        "scored": list(trainer._logs["rewards"]["ranks"]),
        "advantage": list(trainer._logs["advantages"]),
    }
    return {"history": history, "rows": rows_of_last_rollout}
