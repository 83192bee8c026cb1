"""A run whose groups are spread over processes continues with another number of them as if it had not stopped."""

import pytest
from support.dealt_completions import generate_by_prompt
from support.launching import results_of
from support.trainers import BIG_STEPS, config, moves, prompts, train_file, vision_trainer

COMPARED = ("replay/size", "replay/mean_age", "replay/replaced_fraction", "dynamic_sampling/generated_groups", "reward")


def sparse_reward(completions, **kwargs):
    """Equal within most groups."""
    return [float(len(completion[0]["content"]) % 5 == 0) for completion in completions]


def run(model_folder, question_file, output, rows_per_process, checkpoint=None):
    """How far weights moved, and what was logged, in the eight steps of a run or of one that is continued."""
    options = config(
        output, per_device_train_batch_size=rows_per_process, gradient_accumulation_steps=3, max_steps=8,
        save_strategy="steps", save_steps=4, compute_attention_metrics=False, replay_buffer_size=4,
        dynamic_sampling="resample", dynamic_sampling_max_rounds=1, **BIG_STEPS,
    )  # fmt: skip
    trainer = vision_trainer(model_folder, sparse_reward, options, prompts(question_file))
    trainer.model.generate = generate_by_prompt(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return moves(trainer, model_folder), [entry for entry in trainer.state.log_history if "reward" in entry]


def run_two(model_folder, question_file, folder):
    """In two processes: a run, and the rest of that of one process."""
    starts = {"two": None, "one-two": str(folder / "one" / "checkpoint-4")}
    return {name: run(model_folder, question_file, folder / name, 2, start) for name, start in starts.items()}


@pytest.fixture(scope="module")
def runs(model_folder, question_files, tmp_path_factory):
    """How far weights moved and history of eight steps, by processes before and after the fourth step."""
    folder, data = tmp_path_factory.mktemp("resume"), (model_folder, train_file(question_files))
    found = {"one": run(*data, folder / "one", 4)} | results_of(run_two, *data, folder, processes=2)[0]
    return found | {"two-one": run(*data, folder / "two-one", 4, str(folder / "two" / "checkpoint-4"))}


@pytest.mark.minutes
@pytest.mark.parametrize("which", ["two", "one-two", "two-one"])
def test_another_number_of_processes_continues_the_run(which, runs):
    (moved, history), (expected_moves, expected) = runs[which], runs["one"]
    assert len(history) == len(expected) == 8
    for name in COMPARED:
        assert [entry[name] for entry in history] == pytest.approx([entry[name] for entry in expected]), name
    assert (moved - expected_moves).abs().max() < 2e-4 * expected_moves.abs().max()
    assert expected_moves.abs().max() > 1e-4
    for name in ("replay/replaced_fraction", "dynamic_sampling/generated_groups"):
        assert sum(entry[name] for entry in expected[4:]) > 0, "something depends on what the checkpoint brought"
