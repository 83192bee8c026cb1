import base64
import itertools
import json
import math
import random
import re
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from made_run import completion, make_run, thumbnail

from vgr_trl.cli.__main__ import main
from vgr_trl.errors import DataError
from vgr_trl.reporting.page import DATA_PLACEHOLDER, load_template, write_report
from vgr_trl.reporting.records import LogEntry, encode_entry, read_thumbnail

SOURCES = Path(__file__).parents[2] / "report_page"
DATA = re.compile(r'(<script type="text/plain" id="data">)([A-Za-z0-9+/=]*)(</script>)')
HOSTILE = (
    "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \u2028\u2029\u202e\x00\x1b[31m ]]> ${x} `\\"
)


def data_in(path: Path) -> dict[str, Any]:
    found = DATA.search(path.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[2])))


def report_of(run: Path, **options: Any) -> dict[str, Any]:
    write_report([run], run / "page.html", **options)
    return data_in(run / "page.html")["runs"][0]


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
    assert (first["tokens"][4], first["solution"], first["correct"]) == (" blue", "red", False)
    thumbnail = base64.b64decode(data["images"][first["images"][0]["file"]])
    assert thumbnail == (tmp_path / "run/rollouts" / first["images"][0]["file"]).read_bytes()


def test_the_page_of_a_demo_has_its_table_before_and_after(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "run/metrics.json").write_text('{"eval_reward": 0.5}')  # of `vgr-trl train`
    assert report_of(tmp_path / "run")["compared"] == []
    group = {"before": {"accuracy": 0.5, "interval": [0.25, 0.75], "blind": 0.25}, "after": {"k": 8, "mean_at_k": 0.75}}
    whole = {when: {"questions": 320, "format": 1.0, **scores} for when, scores in group.items()}
    metrics = {when: {**scores, "unparsable": 0.5, "groups": {"colour": group[when]}} for when, scores in whole.items()}
    (tmp_path / "run/metrics.json").write_text(json.dumps({"seconds": 3, **metrics}))
    assert report_of(tmp_path / "run")["compared"] == [{"name": "all", **whole}, {"name": "colour", **group}]


def test_text_cannot_leave_its_place(tmp_path: Path) -> None:
    tokens = [HOSTILE, "</SCRIPT >", "<!--<script>", DATA_PLACEHOLDER]
    extra = [completion(tmp_path, 0, True, tokens=tokens, prompt=HOSTILE)]
    make_run(tmp_path / "run", steps=1, name=HOSTILE, extra=extra)
    rewrite(tmp_path / "run", "records-000001.jsonl", lambda text: text.replace('" disc"', r'" \ud800disc"'))
    page = tmp_path / "page.html"
    write_report([tmp_path / "run"], page)
    text = page.read_text(encoding="utf-8")
    assert DATA.sub(rf"\g<1>{DATA_PLACEHOLDER}\g<3>", text) == load_template()  # nothing else has changed
    run = data_in(page)["runs"][0]
    assert run["name"] == HOSTILE
    assert run["records"][-1]["completions"][-1]["tokens"] == tokens
    assert run["records"][0]["completions"][0]["tokens"][2] == " ?disc"  # a lone surrogate


def test_page_is_built_from_its_sources_loads_nothing_and_names_its_licences() -> None:
    # The same as in report_page/finish.mjs. If this fails: `make report-page`.
    left_out = {"node_modules", "dist", ".gitignore"}
    paths = [path.relative_to(SOURCES) for path in SOURCES.rglob("*") if path.is_file()]
    kept = sorted(path.as_posix() for path in paths if not left_out & set(path.parts))
    digest = sha256()
    for path in kept:
        digest.update(f"{path}\n".encode() + (SOURCES / path).read_bytes() + b"\n")
    page = load_template()
    assert f'name="vgr-trl-page-sources" content="{digest.hexdigest()}"' in page
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:script|link|img)\b[^>]*\s(?:src|href)=\"(?!data:)", page)
    for library in ("preact", "uplot", "@floating-ui/dom"):
        assert re.search(rf"^## {library} - ", page, re.MULTILINE)


def test_a_large_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    # 28 kB of noise in each of 40 records need 1.1 MB, and the page has 1 with the template.
    dice = random.Random(0)
    run = make_run(tmp_path / "run", steps=40, extra=[completion(tmp_path, 0, True, prompt="NOISE")])
    noise = re.compile("NOISE")
    rewrite(run, "records-000001.jsonl", lambda text: noise.sub(lambda _: dice.randbytes(28_000).hex(), text))
    shown = report_of(run, max_megabytes=1)
    assert (run / "page.html").stat().st_size <= 1e6
    steps = [record["step"] for record in shown["records"] if record["mode"] == "train"]
    assert 10 < len(steps) < 40
    assert {1, 40} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 3  # evenly spread
    assert shown["notes"][0].startswith(f"{len(shown['records'])} of 42 recorded steps")


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
    (note,) = report_of(tmp_path / "run")["notes"]
    assert "3 thumbnails are missing" in note
    assert list(data_in(tmp_path / "run/page.html")["images"]) == [f"images/{names[3]}"]
    assert read_thumbnail(folder.parent, "../../secret.webp") is None


def test_the_last_step_is_read_beside_the_summary_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    entries = [LogEntry(3, "train", 0.0, {"grad_norm": math.nan}), LogEntry(3, "train", 0.0, {"train_runtime": 9.0})]
    (run / "rollouts/logs.jsonl").write_bytes(b"".join(map(encode_entry, entries)))
    assert report_of(run)["signs"] == [{"step": 3, "seen": "grad_norm is not finite"}]


def test_an_evaluation_that_falls_or_has_no_right_answer_is_flagged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    logs = run / "rollouts/logs.jsonl"
    cases = {(0.094, 1.0, 0.047): [" 9.4 % → 4.7 %"], (0.047, 1.0, 0.094): [], (0, 0, 0): ["accuracy is 0 throughout"]}
    for reached, flagged in cases.items():
        values = dict(zip((1, 2, 4), reached, strict=True))  # what it reached in between does not matter
        entries = [LogEntry(step, "eval", 0.0, {"eval_rewards/accuracy_reward/mean": x}) for step, x in values.items()]
        logs.write_bytes(b"".join(map(encode_entry, entries)))
        signs = report_of(run)["signs"]
        assert [sign["step"] for sign in signs] == [4] * len(flagged)
        assert all(sign["seen"].endswith(end) for sign, end in zip(signs, flagged, strict=True))


def test_evaluated_completions_stand_beside_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    name = thumbnail(tmp_path, "red", 0)
    picture = {"file": name, "thumbnail": base64.b64encode((tmp_path / name).read_bytes()).decode()}
    record = {
        "prompt": "Which?", "solution": "red", "greedy": "red", "sampled": ["blue", "red"], "correct": 1.0,
        "correct_sampled": [0.0, 1.0], "format": 1.0, "format_sampled": [0.0, 1.0], "rewards": {"length": -0.5},
        "images": [picture | {"width": 400, "height": 300}],
    }  # fmt: skip
    scores = {"questions": 1, "k": 2, "accuracy": 1.0, "records": [record]}
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({"models": {"before": scores, "after": scores}}))
    page = tmp_path / "page.html"
    write_report([run, file], page, names=["trained", "shapes"])
    data = data_in(page)
    assert [each["name"] for each in data["runs"]] == ["trained", "shapes: before", "shapes: after"]
    assert data["runs"][1]["scores"] == {"questions": 1, "k": 2, "accuracy": 1.0}
    (shown,) = data["runs"][1]["records"]
    assert shown["step"] == 0
    assert [(each["drawn"], each["text"], each["correct"]) for each in shown["completions"]] == [
        ("greedy", "red", True), ("sampled", "blue", False), ("sampled", "red", True),
    ]  # fmt: skip
    assert shown["completions"][0]["rewards"] == {"format": 1.0, "length": -0.5}
    assert len({each["question"] for side in data["runs"][1:] for each in side["records"][0]["completions"]}) == 1
    assert data["images"][name] == picture["thumbnail"]
    file.write_text('{"accuracy": 1.0, "k": Infinity}')  # no JSON that a browser reads
    write_report([file], page)
    assert data_in(page)["runs"][0]["scores"] == {"accuracy": 1.0, "k": None}
    for bad in ("{", "[]", '{"models": {"m": 1}}', '{"accuracy": 1.0, "records": [{"greedy": "a"}]}'):
        file.write_text(bad)
        with pytest.raises(DataError):
            write_report([file], page)


def test_live_writes_again_until_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, seen = make_run(tmp_path / "run", steps=1, name="\x1b[31mred"), []
    (run / "rollouts/logs.jsonl").write_text("")

    def sleep(seconds: float) -> None:
        seen.append((seconds, data_in(run / "report.html")["live"]))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    assert main(["report", str(run), "--live", "5"]) == 0
    assert seen == [(5.0, 5.0)] * 2
    assert data_in(run / "report.html")["live"] is None
    assert r"\x1b[31mred: " in capsys.readouterr().out  # names do not steer the terminal
    for wrong in ([str(run), "--live", "0"], [str(tmp_path / "missing")]):
        assert main(["report", *wrong]) == 1
