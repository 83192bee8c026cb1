"""The page of a report as a file: what goes into it, what stays out of it, and what it says about what is missing."""

import base64
import itertools
import json
import random
import re
import zlib
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import completion, make_run

from vgr_trl.cli.__main__ import main
from vgr_trl.reporting import page as curves
from vgr_trl.reporting import page as page_data
from vgr_trl.reporting.page import (
    PLACE,
    Curve,
    Curves,
    ends_first,
    interleaved,
    page_template,
    read_thumbnail,
    write_report,
)
from vgr_trl.reporting.records import AttentionMap
from vgr_trl.utils import ConfigError, DataError

SOURCES = Path(__file__).parents[4] / "report_page"
DATA = re.compile(r'(<script type="text/plain" id="data">)([A-Za-z0-9+/=]*)(</script>)')


def data_in(path: Path) -> dict[str, Any]:
    """Return what a page holds, unpacked as the page itself does it."""
    found = DATA.search(path.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[2])))


def report_of(run: Path, **options: Any) -> dict[str, Any]:
    """Return the only run in the page of a run."""
    page = run / "page.html"
    write_report([run], page, **options)
    return data_in(page)["runs"][0]


def rewrite(run: Path, name: str, change: Any) -> None:
    path = run / "rollouts" / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def test_page_holds_curves_completions_and_thumbnails(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=4)
    page = tmp_path / "page.html"
    report = write_report([tmp_path / "run"], page)
    data = data_in(page)
    (run,) = data["runs"]
    assert (run["name"], run["model"], run["notes"]) == ("run", "tiny", [])
    assert [(record["step"], record["mode"]) for record in run["records"]] == [
        (1, "eval"), (1, "train"), (2, "train"), (3, "train"), (4, "eval"), (4, "train"),
    ]  # fmt: skip
    assert report.records == 6
    assert report.size == page.stat().st_size < 10e6
    reward = {curve["mode"]: curve for curve in run["curves"] if curve["name"] == "reward"}
    assert reward["train"]["steps"] == [1, 2, 3, 4]
    assert reward["train"]["values"] == pytest.approx([0.425, 0.55, 0.675, 0.8])
    assert reward["eval"]["steps"] == [1, 4]  # logged as eval_reward
    assert reward["eval"]["values"] == pytest.approx([0.32, 0.38])
    first = run["records"][0]["completions"][0]
    assert first["tokens"][4] == " blue"
    assert first["solution"] == "red"
    assert first["correct"] is False
    thumbnail = base64.b64decode(data["images"][first["images"][0]["file"]])
    assert thumbnail == (tmp_path / "run/rollouts" / first["images"][0]["file"]).read_bytes()


HOSTILE = (
    "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \u2028\u2029\u202e\x00\x1b[31m ]]> ${x} `\\"
)


def test_text_cannot_leave_its_place(tmp_path: Path) -> None:
    tokens = [HOSTILE, "</SCRIPT >", "<!--<script>", PLACE]
    extra = [completion(tmp_path, 0, True, tokens=tokens, prompt=HOSTILE)]
    make_run(tmp_path / "run", steps=1, name=HOSTILE, extra=extra)
    page = tmp_path / "page.html"
    write_report([tmp_path / "run"], page)
    text = page.read_text(encoding="utf-8")
    assert DATA.sub(rf"\g<1>{PLACE}\g<3>", text) == page_template()  # nothing else has changed
    run = data_in(page)["runs"][0]
    assert run["name"] == HOSTILE
    assert run["records"][-1]["completions"][-1]["tokens"] == tokens


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1)
    rewrite(tmp_path, "records-000001.jsonl", lambda text: text.replace('" disc"', r'" \ud800disc"'))
    assert report_of(tmp_path)["records"][0]["completions"][0]["tokens"][2] == " ?disc"


def test_page_is_built_from_its_sources() -> None:
    # The same as in report_page/finish.mjs. If this fails: `make report-page`.
    left_out = {"node_modules", "dist", ".gitignore"}
    paths = [path.relative_to(SOURCES) for path in SOURCES.rglob("*") if path.is_file()]
    kept = sorted(path.as_posix() for path in paths if not left_out & set(path.parts))
    digest = sha256()
    for path in kept:
        digest.update(f"{path}\n".encode() + (SOURCES / path).read_bytes() + b"\n")
    assert f'name="vgr-trl-page-sources" content="{digest.hexdigest()}"' in page_template()


def test_page_loads_nothing_and_names_its_licences() -> None:
    page = page_template()
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:script|link|img)\b[^>]*\s(?:src|href)=\"(?!data:)", page)
    for library in ("preact", "uplot", "@floating-ui/dom"):
        assert re.search(rf"^## {library} - ", page, re.MULTILINE)
    assert page.count("Permission is hereby granted") >= 3
    assert page.count(PLACE) == 1


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / folder, steps=1, name="same") for folder in ("one", "two")]
    page = tmp_path / "page.html"
    write_report([*folders, folders[0] / "rollouts"], page)
    assert [run["name"] for run in data_in(page)["runs"]] == [
        f"same ({folders[0]})", f"same ({folders[1]})", f"same ({folders[0]}) #3",
    ]  # fmt: skip
    write_report(folders, page, names=["a", "b"])
    assert [run["name"] for run in data_in(page)["runs"]] == ["a", "b"]
    with pytest.raises(DataError, match="1 names for 2 runs"):
        write_report(folders, page, names=["a"])


def test_a_large_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    # 30 kB of noise in each of 40 records need 1.2 MB, and the page has 1 with the template.
    dice = random.Random(0)
    extra = [completion(tmp_path, 0, True, prompt="NOISE")]
    run = make_run(tmp_path / "run", steps=40, extra=extra)
    noise = re.compile("NOISE")
    rewrite(run, "records-000001.jsonl", lambda text: noise.sub(lambda _: dice.randbytes(30_000).hex(), text))
    shown = report_of(run, max_megabytes=1)
    assert (run / "page.html").stat().st_size <= 1e6
    steps = [record["step"] for record in shown["records"] if record["mode"] == "train"]
    assert 10 < len(steps) < 40
    assert {1, 40} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 3  # evenly spread
    assert shown["notes"] == [
        f"{len(shown['records'])} of 42 recorded steps are shown, at even distances, to keep the page small.",
        "Attention over the image is rounded to 16 steps, to keep the page small.",
    ]


def test_attention_maps_are_left_out_before_records_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "ATTENTION_SHARE", 0.0)
    make_run(tmp_path, steps=1)
    shown = report_of(tmp_path)
    assert [len(record["completions"]) for record in shown["records"]] == [2, 2]
    assert all(item["attention"] is None for record in shown["records"] for item in record["completions"])
    assert shown["notes"] == ["Attention over the image is shown for 0 of 4 completions, to keep the page small."]


def test_attention_maps_of_large_runs_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionMap([0.5], bytes([0, 8, 9, 17, 100, 255, 246, 247, 1, 2, 3, 4]))
    looked = replace(completion(tmp_path, 0, True, tokens=["a"]), attention=attention)
    run = make_run(tmp_path / "run", steps=1, extra=[looked])
    assert base64.b64decode(last_map(report_of(run))["values"]) == attention.values
    monkeypatch.setattr(page_data, "size_of_records", lambda _: 10**9)
    shown = report_of(run)
    # Multiples of 17 that are next: 100 = 5.88 · 17 → 102, 246 = 14.47 · 17 → 238, 247 = 14.53 · 17 → 255.
    assert list(base64.b64decode(last_map(shown)["values"])) == [0, 0, 17, 17, 102, 255, 238, 255, 0, 0, 0, 0]
    assert shown["notes"] == ["Attention over the image is rounded to 16 steps, to keep the page small."]


def last_map(run: dict[str, Any]) -> dict[str, Any]:
    return run["records"][-1]["completions"][-1]["attention"]


def test_curves_are_thinned_at_even_distances() -> None:
    curve = Curve("reward", "train", list(range(0, 5001)), [float(step) for step in range(5001)])
    short = Curve("eval", "eval", [0, 5000], [0.0, 1.0])
    thinned = Curves([curve, short], ["before"]).thinned(1001)
    assert thinned.curves[0].steps == list(range(0, 5001, 5))
    assert thinned.curves[1] is short
    assert thinned.notes == ["before", "Curves show 1001 of 5001 logged steps, at even distances."]
    assert Curves([short], []).thinned(2).notes == []


def test_a_large_log_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, steps=120)
    monkeypatch.setattr(curves, "LARGEST_LOG", 1000)
    monkeypatch.setattr(curves, "SAMPLED_LINES", 20)
    monkeypatch.setattr(curves, "LONGEST_LINE", 4000)
    shown = report_of(tmp_path)
    reward = next(curve for curve in shown["curves"] if (curve["name"], curve["mode"]) == ("reward", "train"))
    assert 18 <= len(reward["steps"]) <= 21
    assert reward["steps"][0] <= 1 + 120 / 20
    assert reward["steps"][-1] == 120
    gaps = [b - a for a, b in zip(reward["steps"], reward["steps"][1:], strict=False)]
    assert max(gaps) <= 2 * min(gaps[:-1])
    assert any(note.startswith("The log is 0 MB large: curves show") for note in shown["notes"])


def test_ends_come_first() -> None:
    assert ends_first([0, 1, 2, 3, 4]) == [0, 4, 2, 1, 3]
    assert ends_first([]) == []
    assert ends_first([7]) == [7]
    assert ends_first([7, 8]) == [7, 8]
    assert interleaved([1, 2], [5, 6, 7]) == [1, 5, 2, 6, 7]


@given(st.integers(0, 200), st.integers(1, 200))
def test_every_beginning_is_spread_evenly(count: int, shown: int) -> None:
    order = ends_first(range(count))
    assert sorted(order) == list(range(count))
    begun = sorted(order[:shown])
    gaps = [b - a for a, b in itertools.pairwise(begun)]
    if len(gaps) > 1:
        assert max(gaps) <= 2 * min(gaps) + 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folder rollouts"):
        write_report([tmp_path], tmp_path / "page.html")


def test_half_written_run_gives_a_page_with_notes(tmp_path: Path) -> None:
    make_run(tmp_path, steps=3)
    for name in ("records-000001.jsonl", "logs.jsonl"):
        rewrite(tmp_path, name, lambda text: text[:-40])
    (tmp_path / "rollouts/run.json").write_text('{"version": 1, "na')
    shown = report_of(tmp_path)
    assert shown["name"] == tmp_path.name
    assert len(shown["records"]) == 4
    assert shown["notes"] == ["1 damaged log entry is left out.", "1 damaged record is left out."]


def test_missing_and_foreign_thumbnails_stay_out(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    folder = tmp_path / "run/rollouts/images"
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 4
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes(b"no picture")
    (tmp_path / "secret.webp").write_bytes((folder / names[2]).read_bytes())
    (folder / names[2]).unlink()
    (folder / names[2]).symlink_to(tmp_path / "secret.webp")
    page = tmp_path / "page.html"
    write_report([tmp_path / "run"], page)
    assert list(data_in(page)["images"]) == [f"images/{names[3]}"]
    assert data_in(page)["runs"][0]["notes"] == ["3 thumbnails are missing: grey is shown instead."]
    assert read_thumbnail(folder.parent, "../../secret.webp") is None


def write_state(folder: Path, text: str | None = None) -> None:
    history = [
        {"step": 5, "epoch": 0.1, "reward": 0.25, "entropy": float("nan")},
        {"step": 5, "eval_reward": 0.5, "eval_runtime": 1.0},
        {"step": 10, "reward": 0.75, "entropy": 2.0},
        {"step": 10, "train_runtime": 3.0, "train_loss": 0.1},
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(text if text is not None else json.dumps({"log_history": history}))


def test_run_without_records_shows_the_curves_of_the_trainer(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-9", '{"log_history": []}')
    write_state(tmp_path / "checkpoint-10")
    shown = report_of(tmp_path)
    assert shown["curves"] == [
        {"name": "reward", "mode": "train", "steps": [5, 10], "values": [0.25, 0.75]},
        {"name": "entropy", "mode": "train", "steps": [5, 10], "values": [None, 2.0]},
        {"name": "reward", "mode": "eval", "steps": [5], "values": [0.5]},
    ]
    assert shown["notes"] == [
        "Curves are those of checkpoint-10/trainer_state.json.",
        "The run has no records of completions: it has curves only.",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"log_history": 3}', "[" * 100_000, '{"log_history": [{"step": 1, "loss": 1' + "0" * 400 + "}]}"],
)
def test_damaged_trainer_state_gives_a_note(tmp_path: Path, text: str) -> None:
    write_state(tmp_path, text)
    shown = report_of(tmp_path)
    assert shown["curves"] == []
    assert shown["notes"][0].startswith("trainer_state.json is damaged (")


def test_trainer_state_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    write_state(tmp_path)
    with (tmp_path / "trainer_state.json").open("r+b") as file:
        file.truncate(10**9)  # a hole: it takes no room on the disk
    assert report_of(tmp_path)["notes"][0] == "trainer_state.json is 954 MB large and is not read: there are no curves."


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="cannot be written to .*, which is a folder: give another --output"):
        write_report([run], tmp_path)
    with pytest.raises(ConfigError, match="cannot be written to .*give another --output"):
        write_report([run], "a\0b")
    with pytest.raises(ConfigError, match=r"max_megabytes is 0.5: give a number in \[1, 100\]"):
        write_report([run], tmp_path / "page.html", max_megabytes=0.5)
    with pytest.raises(ConfigError, match="No run is given"):
        write_report([], tmp_path / "page.html")


def test_a_page_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, page = make_run(tmp_path / "run", steps=1), tmp_path / "page.html"
    page.write_text("before")

    def fill_disk(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    with pytest.raises(
        ConfigError, match=r"\(Disk full while writing .*page\.html: free space there\): give another --output"
    ):
        write_report([run], page)
    assert page.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.mark.parametrize("name", ["records-000001.jsonl", "logs.jsonl"])
def test_files_that_are_gone_or_not_allowed_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, opened = make_run(tmp_path / "run", steps=1), Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=f"cannot be read .*{name}.*: check"):
        write_report([run], tmp_path / "page.html")


@pytest.mark.parametrize("step", ["1e999", "9" * 5000], ids=["infinite", "of 5000 digits"])
def test_a_step_that_is_none_costs_that_record_only(tmp_path: Path, step: str) -> None:
    make_run(tmp_path, steps=3)
    rewrite(tmp_path, "records-000001.jsonl", lambda text: text.replace('"step":2', f'"step":{step}', 1))
    assert len(report_of(tmp_path)["records"]) == 4


def test_damages_of_the_log_are_told_where_the_curves_are_the_trainers(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1)
    (tmp_path / "rollouts/logs.jsonl").write_text("damaged\n")
    write_state(tmp_path)
    notes = report_of(tmp_path)["notes"]
    assert notes == ["1 damaged log entry is left out.", "Curves are those of trainer_state.json."]


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=1, name="\x1b[31mred")
    (run / "rollouts/logs.jsonl").write_text("")
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b[31mred: " in said


def test_command_writes_the_page_into_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=2)
    rewrite(run, "records-000001.jsonl", lambda text: text + '{"version":1,')
    assert main(["report", str(run)]) == 0
    assert len(data_in(run / "report.html")["runs"]) == 1
    said = capsys.readouterr().out
    assert "report.html: 0.1 MB, 4 recorded steps." in said
    assert "run: 1 damaged record is left out." in said


def test_command_says_what_is_wrong_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err == (
        f"vgr-trl report: {tmp_path / 'missing'} is no folder: give the output_dir of a run.\n"
    )
