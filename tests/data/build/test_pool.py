import os
from collections import Counter

import pytest
from support.made_sets import picture

from vgr_trl.data import convert as pool
from vgr_trl.data.convert import Encoding, encoder
from vgr_trl.utils import DataError


class Deadly:
    """Ends the process that unpacks it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_order_is_kept_and_reasons_take_the_place_of_images():
    rows = [
        (number, [picture((number, 0, 0))] if number % 5 else [{"bytes": b"none", "path": None}])
        for number in range(60)
    ]
    with encoder(Encoding(), 2) as encode:
        found = list(encode(rows))
    assert [item for item, _ in found] == list(range(60))
    assert [images for number, images in found if number % 5 == 0] == [
        "image is unreadable: not in a known image format"
    ] * 12
    assert [images[0].data for number, images in found if number % 5] == [
        picture((n, 0, 0))["bytes"] for n in range(60) if n % 5
    ]


def test_no_more_rows_are_held_than_said():
    """With one worker at most three tasks of eight rows are waiting when a row is taken."""
    read = Counter()

    def rows():
        for number in range(100):
            read["rows"] = number + 1
            yield number, [picture()]

    with encoder(Encoding(), 1) as encode:
        ahead = [read["rows"] - item for item, _ in encode(rows())]
    assert max(ahead) <= pool.ROWS_PER_TASK * pool.TASKS_PER_WORKER


def test_large_images_make_small_tasks(monkeypatch):
    monkeypatch.setattr(pool, "BYTES_PER_TASK", 100)  # less than two of these images
    tasks = []
    encode_rows = pool._encode_rows

    class Executor:
        def submit(self, function, images, encoding):
            from concurrent.futures import Future

            tasks.append(len(images))
            done = Future()
            done.set_result(encode_rows(images, encoding))
            return done

    found = list(pool._spread(((number, [picture()]) for number in range(6)), Executor(), Encoding(), 3))
    assert len(found) == 6
    assert len(picture()["bytes"]) * 2 > 100
    assert max(tasks) <= 2


def test_a_process_that_ends_is_one_sentence():
    with (
        pytest.raises(DataError, match="A process that decodes images ended unexpectedly"),
        encoder(Encoding(), 1) as encode,
    ):
        list(encode([("a", [Deadly()])]))
