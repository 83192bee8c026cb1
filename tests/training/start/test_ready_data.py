import socket
from base64 import b64encode
from functools import partial
from pathlib import Path

import numpy
import pytest
from datasets import Dataset, Features, IterableDataset, Json, Value, load_dataset
from PIL import Image
from support import trainers
from transformers import AutoProcessor

from vgr_trl.data.images import images_of
from vgr_trl.errors import ConfigError, DataError
from vgr_trl.rewards import accuracy_reward, think_format_reward
from vgr_trl.trainer import DAPOTrainer

config = partial(trainers.config, per_device_train_batch_size=4, max_completion_length=4, max_steps=1)


@pytest.fixture
def questions(question_files):
    return load_dataset("parquet", data_files=trainers.train_file(question_files), split="train")


def test_a_folder_and_questions_train(model_folder, questions, tmp_path, caplog):
    trainer = DAPOTrainer(
        model=str(model_folder), reward_funcs=["accuracy", "vgr_trl.rewards:think_format_reward", "length"],
        args=config(tmp_path), train_dataset=questions, eval_dataset={"all": questions.select(range(2))},
    )  # fmt: skip
    names = ["accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward"]
    assert trainer.reward_func_names == names
    assert [message["role"] for message in trainer.train_dataset[0]["prompt"]] == ["system", "user"]
    assert "A. " in trainer.eval_dataset["all"][0]["prompt"][1]["content"]
    trainer.train()
    assert trainer.state.global_step == 1


def test_streams_of_questions_and_positional_arguments(model_folder, questions, tmp_path):
    for stream in (questions.to_iterable_dataset(), IterableDataset.from_generator(lambda: iter(questions))):
        trainer = DAPOTrainer(str(model_folder), [think_format_reward], config(tmp_path), stream)
        trainer.train()
        assert trainer.state.global_step == 1


def test_special_tokens_in_texts_leave_rows_out(model_folder, text_rows, tmp_path, caplog):
    def marked(row, index):
        return {"prompt": [{"role": "user", "content": row["prompt"][0]["content"] + "<|im_end|>" * (index % 4 == 0)}]}

    rows = text_rows.map(marked, with_indices=True)
    trainer = DAPOTrainer(str(model_folder), [accuracy_reward], config(tmp_path), rows)
    assert len(trainer.train_dataset) == 9
    questions = Dataset.from_dict({"question": ["a<|image_pad|>", *"bcde"], "answer": ["x"] * 5})
    trainer = DAPOTrainer(str(model_folder), [accuracy_reward], config(tmp_path), questions)
    assert [row["question"] for row in trainer.train_dataset] == [*"bcde"]
    with pytest.raises(
        DataError, match="^None of the 2 rows of the train data .*; the first: its text has .<.im_end.>."
    ):
        DAPOTrainer(str(model_folder), [accuracy_reward], config(tmp_path), rows.select([0, 4]))


def test_a_part_that_names_an_address_is_refused_before_anything_is_fetched(vision_trainer):
    trainer = vision_trainer()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
        for part in ({"type": "image", "image": address}, {"type": "image", "url": address}):
            message = {"role": "user", "content": [part, {"type": "text", "text": "which?"}]}
            with pytest.raises(DataError, match="A row of the data cannot be used: a part of its prompt names a file"):
                trainer._tokenize_prompts([[message]])
        with pytest.raises(TimeoutError):
            server.accept()


def test_padding_on_the_right_is_refused_where_token_types_are_read(model_folder, questions, tmp_path):
    processor = AutoProcessor.from_pretrained(model_folder, padding_side="right")
    options = {"reward_funcs": [think_format_reward], "args": config(tmp_path), "train_dataset": questions}
    with pytest.raises(ConfigError, match='pads on the right: load it with .*padding_side="left"'):
        DAPOTrainer(str(model_folder), processing_class=processor, **options)


def test_rewards_of_one_name_have_metrics_of_their_own(model_folder, questions, tmp_path, caplog):
    rewards = [lambda completions, value=value, **_: [value] * len(completions) for value in (1.0, 2.0, 4.0)]
    options = config(tmp_path, reward_weights=[1.0, 0.5, 0.25])
    trainer = DAPOTrainer(str(model_folder), rewards, options, questions)
    assert trainer.reward_func_names == ["<lambda>", "<lambda>_2", "<lambda>_3"]
    assert "the metrics of one of them are named <lambda>_2" in caplog.text
    trainer.train()
    for number, name in enumerate(trainer.reward_func_names):
        assert trainers.logged(trainer, f"rewards/{name}/mean") == [2.0**number]
        assert trainers.logged(trainer, f"reward_weights/{name}") == [0.5**number]


def asked(content, *more):
    return [{"role": "user", "content": content}, *more]


@pytest.mark.parametrize("stored", [str, Path.read_bytes, lambda path: {"bytes": None, "path": str(path)},
                                    lambda path: [str(path)]])  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_conversations_with_images_are_read_like_questions(vision_trainer, tmp_path, stored, streams):
    Image.fromarray(numpy.full((8, 8), 16384, numpy.uint16)).save(tmp_path / "deep.png")
    Image.new("RGB", (2270, 10)).save(tmp_path / "long.png")
    deep, long = stored(tmp_path / "deep.png"), stored(tmp_path / "long.png")
    filled = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": "which?", "image": None}]
    rows = [
        {"prompt": asked("which <image>?"), "image": deep},
        {"prompt": asked(filled), "image": deep},
        {"prompt": asked("which?"), "image": None},
        {"prompt": asked("which?"), "image": long},
        {"prompt": asked(None), "image": deep},
        {"prompt": asked([{"type": "text", "text": None}]), "image": deep},
        {"prompt": asked([{"type": "image", "image": str(tmp_path / "deep.png")}]), "image": None},
        {"prompt": asked("which?", {"role": "assistant", "content": "red"}), "image": deep},
    ]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    features = Features(prompt=Json(), image=Dataset.from_list([{"image": deep}]).features["image"])
    data = stream if streams else Dataset.from_list(rows, features)
    read = list(vision_trainer(rows=data, per_device_train_batch_size=4, max_steps=1).train_dataset)
    assert [part["type"] for part in read[0]["prompt"][0]["content"]] == ["text", "image", "text"]
    assert read[1]["prompt"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "which?"}]
    pixels = [[image.getpixel((0, 0)) for image in images_of(row)] for row in read]
    assert pixels == [[(64, 64, 64)], [(64, 64, 64)], []]


@pytest.mark.parametrize("prompt", [asked("which?"), "which?"])
def test_images_in_a_column_that_nothing_reads_are_refused(vision_trainer, png, prompt):
    content = png.read_bytes()
    structure = {"bytes": content, "path": None}
    for column, value in (("picture", structure), ("image_bytes", content), ("base64", b64encode(content).decode())):
        rows = [{"prompt": prompt, column: value}] * 2
        with pytest.raises(DataError, match=f"`{column}` seems to hold images.*rename it to `image`"):
            vision_trainer(rows=Dataset.from_list(rows))


def test_columns_of_rewards_of_the_users_own_stay_as_they_are(vision_trainer):
    row = {"prompt": asked("which?"), "solution": [{"box": [1, 2]}], "choices": {"hard": True}, "label_idx": 3}
    (read, *_) = vision_trainer(rows=Dataset.from_list([row] * 2)).train_dataset
    assert read == row


@pytest.mark.parametrize("streams", [False, True])
def test_texts_for_a_teacher_are_checked_with_the_other_columns(vision_trainer, png, streams):
    """Only if a teacher reads them: other runs may have anything in a column of that name."""
    bad = ["<image>", "a<|im_end|>", 7, ["a"], "a" * 10**6]
    rows = [{"prompt": asked("which?"), "image": str(png), "privileged_context": text} for text in ("a", None, *bad)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    features = Features(prompt=Json(), image=Value("string"), privileged_context=Json())
    data = stream if streams else Dataset.from_list(rows, features)
    given = {"rows": data, "per_device_train_batch_size": 4, "max_steps": 1}
    assert len(list(vision_trainer(**given).train_dataset)) == 7
    teacher = {"teacher_view": "privileged_context", "credit_rules": ["rlsd"]}
    read = list(vision_trainer(**given, **teacher).train_dataset)
    assert [row["privileged_context"] for row in read] == ["a", None]


def test_a_stream_may_hold_images_in_parts_of_messages_and_arrays(vision_trainer):
    red = Image.new("RGB", (8, 8), "red")
    rows = [
        {"prompt": asked([{"type": "image", "image": red}, {"type": "text", "text": "which?"}])},
        {"prompt": asked("which?"), "image": numpy.asarray(red)},
        {"prompt": asked("which?"), "images": [numpy.zeros((8, 8, 3), numpy.float32)]},
    ]
    data = IterableDataset.from_generator(lambda: iter(rows))
    read = list(vision_trainer(rows=data, per_device_train_batch_size=4, max_steps=1).train_dataset)
    assert [[image.getpixel((0, 0)) for image in images_of(row)] for row in read] == [[(255, 0, 0)]] * 2
