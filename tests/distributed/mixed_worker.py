"""Run by test_mixed_rows.py in two processes: rows with an image on one, rows without on the other."""

from support.trainers import config, prompts, vision_trainer


def length_reward(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def tables_of(model_folder, question_file, output):
    """How many images each row of the tables has."""
    rows = prompts(question_file)
    questions = [dict(rows[index]) for index in range(4)]
    for index in (1, 2):
        questions[index] |= {name: None for name in questions[0] if name in ("image", "images")}
    rows = type(rows).from_list(questions)
    options = config(
        output,
        per_device_train_batch_size=4,
        max_completion_length=4,
        max_steps=2,
        shuffle_dataset=False,
        log_completions=True,
        num_completions_to_print=0,
    )
    trainer = vision_trainer(model_folder, length_reward, options, rows)
    tables = []
    original = trainer.log

    def log(logs, *rest):
        tables.append([len(images) for images in trainer._logs["images"]])
        original(logs, *rest)

    trainer.log = log
    trainer.train()
    return tables
