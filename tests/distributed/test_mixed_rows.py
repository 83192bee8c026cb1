"""Rows with an image on one process and without on the other: TRL gathers the images of its tables on one side only."""

from datasets import Dataset
from support.launching import results_of
from support.trainers import config, prompts, train_file, vision_trainer


def length_reward(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def tables_of(model_folder, question_file, output):
    """How many images each row of the tables has."""
    rows = prompts(question_file)
    questions = [dict(rows[index]) for index in range(4)]
    questions[1]["image"] = questions[2]["image"] = None
    options = config(
        output, per_device_train_batch_size=4, max_completion_length=4, max_steps=2, shuffle_dataset=False,
        log_completions=True, num_completions_to_print=0,
    )  # fmt: skip
    rows = Dataset.from_list(questions)
    trainer, tables = vision_trainer(model_folder, length_reward, options, rows), []
    original = trainer.log

    def log(logs, *rest):
        tables.append([len(images) for images in trainer._logs["images"]])
        original(logs, *rest)

    trainer.log = log
    trainer.train()
    return tables


def test_rows_with_and_without_images_on_two_processes(model_folder, question_files, tmp_path):
    data = model_folder, train_file(question_files)
    tables, _ = results_of(tables_of, *data, tmp_path, processes=2)
    # Rows 0 and 1 are dealt to the two processes, then rows 2 and 3; rows 1 and 2 have no image.
    assert tables[:2] == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
