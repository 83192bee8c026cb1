"""Images stand beside their own completions in the table."""

from collections import deque
from types import SimpleNamespace

from vgr_trl.patches import images_logged_by_all


def test_batches_without_images_among_batches_with_some():
    logs = {"prompt": deque(maxlen=6), "images": deque(maxlen=6)}
    trainer = SimpleNamespace(log_multimodal=True, tools=None, environment_factories=None, _logs=logs)
    of_messages = [{"role": "user", "content": [{"type": "image", "image": "c"}, {"type": "text", "text": "?"}]}]
    batches = (
        [{"prompt": "p"}, {"prompt": "q"}],
        [{"prompt": "r", "image": "a"}, {"prompt": "s", "images": ["b", "b"]}],
        [{"prompt": of_messages}, {"prompt": "t", "images": None}],
        [{"prompt": "u"}, {"prompt": "v"}],
    )
    found = []
    for rows in batches:
        with images_logged_by_all(trainer, rows):
            assert not trainer.log_multimodal
            logs["prompt"].extend(rows)  # as TRL does
        found.append(list(logs["images"]))
    assert trainer.log_multimodal
    assert found == [
        [],
        [[], [], ["a"], ["b", "b"]],
        [[], [], ["a"], ["b", "b"], ["c"], []],
        [["a"], ["b", "b"], ["c"], [], [], []],
    ]
