"""Prompts that a caller has made himself, or a stream of them: no file that they name is read or fetched."""

import socket

import pytest
from support.trainers import config, letters_reward, prompts, train_file, vision_trainer

from vgr_trl.utils import DataError


def test_a_part_that_names_an_address_is_refused_before_anything_is_fetched(model_folder, question_files, tmp_path):
    trainer = vision_trainer(model_folder, letters_reward, config(tmp_path), prompts(train_file(question_files)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
        for part in ({"type": "image", "image": address}, {"type": "image", "url": address}):
            message = {"role": "user", "content": [part, {"type": "text", "text": "which?"}]}
            with pytest.raises(DataError, match="A row of the data cannot be used: a part of its prompt names a file"):
                trainer._tokenize_prompts([[message]])
        with pytest.raises(TimeoutError):
            server.accept()
