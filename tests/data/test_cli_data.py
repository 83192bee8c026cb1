import signal
from pathlib import Path

from datasets import load_dataset
from support.made_sets import jsonl, parquet, picture, rows_in, skipped_in

from vgr_trl.cli.__main__ import main
from vgr_trl.data.checked_rows import prepare_rows
from vgr_trl.data.load import load_split

CHOICES = ["red", "blue", "green", "teal"]


def aokvqa(path: Path, rows: int = 12, **changed) -> Path:
    made = [
        {"image": picture((number, 0, 0)), "question_id": f"q{number}", "question": f"What is it {number}?"}
        | {"choices": CHOICES, "correct_choice_idx": number % 4, **changed}
        for number in range(rows)
    ]
    return parquet(path, made)


def run(*arguments) -> int:
    return main(["data", *map(str, arguments)])


def convert(tmp_path, *flags, source="aokvqa", out="out") -> int:
    return run("convert", source, "--output_dir", tmp_path / out, "--workers", 0, *flags)


def ids(folder, split="train"):
    return [row["id"] for row in rows_in(folder, split)]


def test_a_set_is_converted_and_reported(tmp_path, capsys):
    file = aokvqa(tmp_path / "a.parquet", correct_choice_idx=1)
    aokvqa(tmp_path / "b.parquet", 1, correct_choice_idx=9)
    assert convert(tmp_path, "--data_files", file, tmp_path / "b.parquet") == 0
    printed = capsys.readouterr().out
    assert "train: 12 rows" in printed
    assert "12  100.0%  ████████████████████  B" in printed
    assert f"1 skipped are listed in {tmp_path / 'out' / 'skipped.jsonl'}" in printed
    assert (tmp_path / "out" / "report.txt").read_text(encoding="utf-8") in printed
    assert [(row["file"], row["row"]) for row in skipped_in(tmp_path / "out")] == [(f"{file},{tmp_path}/b.parquet", 12)]
    rows, skipped = prepare_rows(load_split("train", dataset_path=str(tmp_path / "out")))
    assert (len(rows), skipped) == (12, [])
    assert convert(tmp_path, "--data_files", file, tmp_path / "b.parquet") == 0  # which replaces the first result
    assert ids(tmp_path / "out") == [f"q{number}" for number in range(12)]


def test_a_split_gets_a_name_that_is_found_again_beside_others(tmp_path, capsys):
    for name, rows in (("train", 2), ("dev", 3)):
        aokvqa(tmp_path / "in" / f"{name}.parquet", rows)
    for split in ("train", "dev", "dev"):
        assert convert(tmp_path, "--dataset_path", tmp_path / "in", "--split", split) == 0
    for split, rows in (("train", 2), ("validation", 3)):
        assert len(load_dataset(str(tmp_path / "out"), split=split, cache_dir=str(tmp_path / "cache"))) == rows
    assert convert(tmp_path, "--dataset_path", tmp_path / "in", "--subset_size", 0, out="none") == 1
    report = (tmp_path / "out" / "report.txt").read_text(encoding="utf-8")
    assert report.index("train: 2 rows") < report.index("validation: 3 rows")
    other = ("--data_files", tmp_path / "in" / "dev.parquet", "--split", "mine")
    assert convert(tmp_path, *other, out="mine") == 1
    assert "The split 'mine' needs a name in the result: give --output_split" in (capsys.readouterr().err)
    assert convert(tmp_path, *other, "--output_split", "test", out="mine") == 0
    assert ids(tmp_path / "mine", "test") == ["q0", "q1", "q2"]


def test_a_copy_of_a_hub_set_is_read_in_its_usual_configuration(tmp_path):
    """MMMU-Pro asks the same questions in three configurations, which are not to be mixed."""
    for config, count in (("standard (4 options)", 4), ("standard (10 options)", 10)):
        row = {"id": config, "question": "Which?", "options": str([f"o{n}" for n in range(count)]), "answer": "A"}
        parquet(tmp_path / "in" / config / "test-00000-of-00001.parquet", [row | {"image_1": picture()}])
    assert convert(tmp_path, "--dataset_path", tmp_path / "in", source="mmmu_pro") == 0
    assert ids(tmp_path / "out", "test") == ["standard (10 options)"]
    four = ("--dataset_config", "standard (4 options)")
    assert convert(tmp_path, "--dataset_path", tmp_path / "in", *four, source="mmmu_pro", out="four") == 0
    assert ids(tmp_path / "four", "test") == ["standard (4 options)"]


def test_what_the_accuracy_reward_reads_of_completions_is_shown(tmp_path, capsys):
    rows = [
        {"output": "The correct option is B.", "solution": "B", "choices": ["red", "blue"]},
        {"completion": "It has 3 dogs.", "solution": ["4", "four"]},
        {"output": "4", "solution": None},
    ]
    jsonl(tmp_path / "completions.jsonl", [*rows, [1], "torn"])
    assert run("score", tmp_path / "completions.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13] for line in lines] == [
        "0: 1 statemen",
        "1: 0 line 'It",
        *(f"{n}: no reward:" for n in (2, 3, 4)),
        "1 of 5 are ri",
    ]


def test_ctrl_c_ends_a_conversion_in_several_processes(tmp_path, request):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    lines = ["import os, signal, time", "def hangs(row):", "    time.sleep(1)"]
    lines += ["    row['prompt'] == '0' and os.kill(os.getppid(), signal.SIGINT)", "    time.sleep(600)"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": str(number), "answer": "x"} for number in range(4)])
    assert convert(tmp_path, "--data_files", file, "--workers", 2, source=f"{tmp_path}/mine.py:hangs") == 130
