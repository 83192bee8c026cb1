"""Every stage gives the same training for one process as for two, with whole groups or a group on both.

Three SGD steps each, with completions that do not depend on how they are dealt to processes.
"""

import math
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from support.dealt_completions import generate_by_prompt
from support.launching import results_of
from support.trainers import BIG_STEPS, config, moves, prompts, train_file, vision_trainer

from vgr_trl.registries import declares
from vgr_trl.rewards import load_reward, needs_whole_groups

DIFFERENT = (
    "perf/", "timing/", "step_time", "sharing/", "skipped/rows", "vision/", "replay/megabytes", "grad_norm", "loss",
    "epoch", "clip_ratio",
)  # fmt: skip


CASES = yaml.safe_load(Path(__file__).with_name("stages.yaml").read_text(encoding="utf-8"))
SCORED = """
def ranks(reward_inputs):  # of the batch of all processes
    texts = [row["response"] for row in reward_inputs]
    return [{"overall": sorted(texts).index(text), "rows": len(texts)} for text in texts]
"""


def sparse_reward(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 5 == 0) for completion in completions]


def partial_reward(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [None if "<answer>A" in text else float(len(text) % 2) for text in texts]


@declares(needs=("similarity",))
def likeness_reward(completions, similarity, **kwargs):
    return similarity


@needs_whole_groups("solution")
def rank_reward(completions, solution, num_generations, log_extra, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    firsts = range(0, len(texts), num_generations)
    assert all(len({*solution[first : first + num_generations]}) == 1 for first in firsts), "whole groups"
    log_extra("text_seen", texts)
    groups = [texts[first : first + num_generations] for first in firsts]
    return [sorted(group).index(text) / num_generations for group in groups for text in group]


def run(name, model_folder, question_file, output, rows_per_process, checkpoint=None):
    """How far weights moved, and what was logged, in a run or in one that is continued."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "attention_rows": "all"} | BIG_STEPS | CASES[name]
    names = [f"{output.parent}/scored.py:ranks" if each == "ranks" else each for each in options.pop("reward_funcs")]
    rewards = [globals().get(each) or load_reward(each) for each in names]
    if name == "critic":  # micro-batches of four rows: two in one process, or one in each of two
        options["gradient_accumulation_steps"], rows_per_process = rows_per_process // 2, 4
    options = config(output / name.replace(" ", "_"), per_device_train_batch_size=rows_per_process, **options)
    rows = prompts(question_file)
    if name in ("regions, similarity and views", "a teacher"):
        boxes = [[0.0, 0.0, 1.0, 0.25 * (1 + row % 3)] if row % 4 else None for row in range(len(rows))]
        rows = rows.add_column("bbox", boxes)
    elif name == "remax, rows without images":  # two rows a step, one on each process
        rows = Dataset.from_list(
            [{**row, "image": None if place in (1, 2, 5) else row["image"]} for place, row in enumerate(rows)]
        )
    trainer = vision_trainer(model_folder, rewards, options, rows)
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return moves(trainer, model_folder), {
        "history": [entry for entry in trainer.state.log_history if "reward" in entry],
        "rewards": {key: list(values) for key, values in trainer._logs["rewards"].items()},
        "advantages": list(trainer._logs["advantages"]),
        "completion": [completion[0]["content"] for completion in trainer._logs["completion"]],
        "images": list(map(len, trainer._logs["images"])),
        "extra": {key: list(values) for key, values in trainer._logs["extra"].items()},
    }


def run_all(*arguments):
    return {name: run(name, *arguments) for name in CASES}


@pytest.fixture(scope="module")
def outcomes(model_folder, question_files, tmp_path_factory):
    folder, file = tmp_path_factory.mktemp("stages"), train_file(question_files)
    (folder / "scored.py").write_text(SCORED)
    one = run_all(model_folder, file, folder / "one", 4)
    return one, results_of(run_all, model_folder, file, folder / "two", 2, processes=2)[0]


@pytest.mark.parametrize("name", CASES)
def test_one_process_and_two_train_the_same(name, outcomes):
    one, two = outcomes
    assert_same(one[name], two[name])


def assert_same(outcome, other):
    (moved, one), (other_moved, two) = outcome, other
    assert moved.abs().max() > 1e-4
    assert (moved - other_moved).abs().max() < 2e-4 * moved.abs().max()
    assert one["rewards"].keys() == two["rewards"].keys()
    for reward, values in one["rewards"].items():
        assert values == pytest.approx(two["rewards"][reward], abs=1e-4, nan_ok=True), reward
    assert one["advantages"] == pytest.approx(two["advantages"], abs=1e-3)
    assert one["images"] == two["images"]
    for extra in ("blind_answers", "text_seen"):
        assert one["extra"].get(extra) == two["extra"].get(extra)
    for first, second in zip(one["history"], two["history"], strict=True):
        assert first.keys() == second.keys()
        for metric, value in first.items():
            if not metric.startswith(DIFFERENT) and isinstance(value, float) and not math.isnan(value):
                assert second[metric] == pytest.approx(value, rel=2e-3, abs=2e-4), metric


def test_the_stages_did_something(outcomes):
    one = {name: result for name, (_, result) in outcomes[0].items()}
    assert set(one["signals"]["rewards"]["vgr_hard_negative_reward"]) - {0.0}
    assert 0.3 < one["signals"]["history"][-1]["combined_token_fraction"] < 1
    for name in ("replay/replaced_fraction", "dynamic_sampling/generated_groups"):
        assert max(entry[name] for entry in one["replay and resample"]["history"]) > 0
    ranks = one["ranks"]
    assert ranks["extra"]["text_seen"] == ranks["completion"], "each process got back its own slice, in order"
    assert all(entry["reward/rows"] == len(ranks["completion"]) for entry in ranks["history"])
    assert len({entry["kl/coefficient"] for entry in one["kl among the rewards"]["history"]}) == 3
    for name in ("critic", "critic model"):
        assert one[name]["history"][-1]["critic/value_mean"] != 0
    assert max(entry["vgr/undefined_fraction"] for entry in one["remax, rows without images"]["history"]) > 0
    assert set(one["noise and blind answers"]["rewards"]["blind_accuracy_reward"]) == {0.0, 1.0}


def run_in(processes, *given):
    return run(*given) if processes == 1 else results_of(run, *given, processes=processes)[0]


@pytest.mark.minutes
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_processes_continues_the_run(before, after, model_folder, question_files, tmp_path):
    data = "replay and resample", model_folder, train_file(question_files)
    whole = run_in(before, *data, tmp_path / "whole", 4 // before)
    checkpoint = str(tmp_path / "whole" / "replay_and_resample" / "checkpoint-4")
    assert_same(whole, run_in(after, *data, tmp_path / "rest", 4 // after, checkpoint))
    for name in ("replay/replaced_fraction", "dynamic_sampling/generated_groups"):
        assert sum(entry[name] for entry in whole[1]["history"][4:]) > 0, "it depends on what the checkpoint brought"
