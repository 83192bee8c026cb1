import json
from contextlib import suppress
from copy import copy

import pytest
from made_run import make_run, with_tools
from support.made_records import completion, record

from vgr_trl.errors import DataError, VGRError
from vgr_trl.reporting.notebook import show_completion, to_pandas
from vgr_trl.reporting.page import write_report
from vgr_trl.reporting.records import (
    AttentionMap,
    LogEntry,
    RecordedImage,
    RecordWriter,
    decode_record,
    encode_entry,
    read_logs,
    read_run,
)


def test_a_record_comes_back_as_it_was():
    written = record(
        7, "eval",
        completion(
            text="é\u2028\n", tokens=["a", ""], weights=[0.5, None], rewards={"x": None}, correct=True, replaced=True,
            metrics={"late": {"vgr": None, "aei_vision": 0.5}}, attention=AttentionMap([0.5, 0.25], bytes(range(6))),
            images=[RecordedImage("images/a.webp", 64, 48, [2, 3]), RecordedImage(None, 0, 0)],
        ),
    )  # fmt: skip
    line = encode_entry(written)
    assert line.count(b"\n") == 1
    assert decode_record(line) == written


def writer(folder, max_bytes=10**7, resumed=False):
    return RecordWriter(folder, {"name": "a run", "rewards": ["accuracy"]}, max_bytes, resumed)


def image(number):
    return f"images/{number:040x}.webp"


def pictured(step, size=0):
    return record(step, "train", completion(images=[RecordedImage(image(step), 8, 8)], text="x" * size))


def test_what_is_written_is_read_in_the_order_of_steps(tmp_path):
    written = writer(tmp_path)
    written.add(pictured(1), {image(1): b"picture"})
    written.add(record(0), {})
    written.add(record(1, "eval"), {})
    written.log(LogEntry(1, "train", 2.0, {"loss": 0.5}))
    for place in (tmp_path, str(tmp_path), tmp_path / "rollouts"):
        run = read_run(place)
        assert list(run.records()) == [record(0), record(1, "eval"), pictured(1)]
        assert [item.step for item in run.records("train")] == [0, 1]
        assert list(read_logs(run.folder / "logs.jsonl")) == [LogEntry(1, "train", 2.0, {"loss": 0.5})]
        assert (run.name, run.rewards, run.description["version"]) == ("a run", ["accuracy"], 1)
    assert (run.folder / image(1)).read_bytes() == b"picture"
    assert {path.name for path in run.folder.iterdir()} == {"images", "logs.jsonl", "records-000001.jsonl", "run.json"}


def test_a_continued_run_appends_behind_what_a_kill_has_left(tmp_path):
    first = writer(tmp_path)
    first.add(record(0), {})
    first.add(record(1, "train", completion(text="old")), {})
    first.log(LogEntry(0, "train", 1.0, {"loss": 1.0}))
    for name, torn in (("records-000001.jsonl", encode_entry(record(3))[:-9]), ("logs.jsonl", b'{"version":1,')):
        with (tmp_path / "rollouts" / name).open("ab") as file:
            file.write(torn)
    created = read_run(tmp_path).description["created"]
    second = writer(tmp_path, resumed=True)
    second.add(record(1), {})
    second.log(LogEntry(1, "train", 2.0, {"loss": 2.0}))
    writer(tmp_path, resumed=True).log(LogEntry(2, "train", 3.0, {"loss": 3.0}))
    assert b"\n\n" not in (tmp_path / "rollouts" / "logs.jsonl").read_bytes()
    run = read_run(tmp_path)
    assert list(run.records()) == [record(0), record(1)]  # of a step that was run twice, the last counts
    assert [entry.values["loss"] for entry in read_logs(run.folder / "logs.jsonl")] == [1.0, 2.0, 3.0]
    assert run.description["created"] == created
    RecordWriter(tmp_path, {"name": "a run", "options": {"max_steps": 8}}, 10**6, resumed=True)
    later = read_run(tmp_path).description
    assert (later["created"], later["options"]) == (created, {"max_steps": 8}), "the options that hold now"


def test_beyond_the_bound_the_oldest_records_but_the_first_go_with_their_thumbnails(tmp_path):
    # 16 files of 1,000 bytes: a record of about 900 bytes fills one; thumbnails of 100 bytes.
    written = writer(tmp_path, 16_000)
    for step in range(40):
        if step % 2:  # what an earlier process has left counts
            written = writer(tmp_path, 16_000, resumed=step > 0)
        written.add(pictured(step, size=600), {image(number): b"x" * 100 for number in (step, 0)})
    folder = tmp_path / "rollouts"
    size = sum(path.stat().st_size for path in [*folder.glob("records-*"), *(folder / "images").iterdir()])
    assert 12_000 < size <= 16_000
    steps = [step for step, _ in read_run(tmp_path).steps()]
    assert steps[0] == 0
    assert steps[1:] == list(range(steps[1], 40))
    assert {f"images/{path.name}" for path in (folder / "images").iterdir()} == set(map(image, steps))


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "run" / "rollouts"
    found.mkdir(parents=True)
    return found


def test_a_damaged_line_costs_that_line_only(folder, caplog):
    broken = encode_entry(record(1)).replace(b'"tokens"', b'"takens"')
    infinite = encode_entry(record(3)).replace(b'"step":3', b'"step":1e999')
    lines = [encode_entry(record(0)), b"\0\0\0\n", broken, infinite, b'{"version":"x"}\n', encode_entry(record(2))]
    (folder / "records-000001.jsonl").write_bytes(b"".join(lines))
    (folder / "logs.jsonl").write_bytes(encode_entry(LogEntry(1, "train", 0.0, {"loss": 1.0})) + b"[]\ntorn {")
    (folder / "run.json").write_text('{"version":')
    run = read_run(folder)
    assert [item.step for item in run.records()] == [0, 2]
    assert [entry.step for entry in read_logs(folder / "logs.jsonl")] == [1]
    assert (run.name, run.rewards) == ("run", [])


@pytest.mark.parametrize("value", ["text", -1.5, [[]], {"a": 1}], ids=str)
def test_every_reader_bears_a_value_of_another_type_anywhere(tmp_path, value):
    run = make_run(tmp_path / "run", steps=1, extra=[with_tools(tmp_path / "run" / "rollouts")])
    for name in ("run.json", "rollouts/run.json", "rollouts/logs.jsonl", "rollouts/records-000001.jsonl"):
        file = run / name
        whole = file.read_bytes()
        *before, last = whole.splitlines() if name.endswith("l") else [whole]
        for place in _places(content := json.loads(last)):
            damaged = json.dumps(_replaced(content, place, value), separators=(",", ":")).encode()
            file.write_bytes(b"\n".join([*before, damaged, b""]))
            with suppress(VGRError):
                write_report([run], tmp_path / "report.html")
                to_pandas(run)
                for item in (item for each in read_run(run).records() for item in each.completions):
                    show_completion(item, run)
        file.write_bytes(whole)


def _places(content, place=()):
    yield place
    items = (
        content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    )
    for name, item in items:
        yield from _places(item, (*place, name))


def _replaced(content, place, value):
    if not place:
        return value
    changed = copy(content)
    changed[place[0]] = _replaced(content[place[0]], place[1:], value)
    return changed


@pytest.mark.parametrize("file", ["records-000001.jsonl", "logs.jsonl", "run.json"])
def test_a_later_version_is_refused(folder, file):
    (folder / "records-000001.jsonl").write_bytes(encode_entry(record(0)))
    (folder / file).write_bytes(encode_entry(LogEntry(0, "train", 0.0, {})).replace(b'"version":1', b'"version":2'))
    with pytest.raises(DataError):
        list(read_logs(read_run(folder).folder / "logs.jsonl"))
