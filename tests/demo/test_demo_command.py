"""The command's exit status and table, and that a short run leaves what it promises."""

import json

import pytest
from rich.console import Console
from transformers import AutoProcessor

from vgr_trl.cli.__main__ import main
from vgr_trl.demo import Options, demo
from vgr_trl.demo.demo import Comparison, comparison_table, draw_questions
from vgr_trl.evaluation import Evaluation
from vgr_trl.reporting.records import read_run


def evaluation(sampled: float) -> Evaluation:
    return Evaluation(questions=4, k=2, accuracy=0.5, mean_at_k=sampled, pass_at_k=1.0, format=1.0, format_sampled=0.75)


def comparison(before: float, after: float) -> Comparison:
    return Comparison(evaluation(before), evaluation(after), evaluation(0.25), evaluation(0.25))


@pytest.mark.parametrize(("after", "status"), [(0.6, 0), (0.5, 1), (0.4, 1)])
def test_exit_status_says_whether_accuracy_rose(monkeypatch, tmp_path, after, status):
    monkeypatch.setattr(demo, "run_demo", lambda options, output_dir: comparison(0.5, after))
    assert main(["demo", "--seed", "3", "--output_dir", str(tmp_path)]) == status


def test_table_shows_before_and_after():
    console = Console(record=True, width=100)
    console.print(comparison_table(comparison(0.5, 0.6)))
    text = console.export_text()
    assert "accuracy, sampled" in text
    assert "0.500" in text
    assert "0.600" in text
    assert "0.250" in text


def test_a_short_run_leaves_model_metrics_and_rollouts(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "warm_up", lambda *arguments: None)
    monkeypatch.setattr(demo, "set_up_process", lambda options: None)  # changes the logging of the whole process
    questions = demo.Questions(
        **{
            split: draw_questions(8, seed=0, split=split, multiple_choice=False)
            for split in ("train", "validation", "test")
        }
    )
    options = Options(steps=2, prompts_per_step=2, num_generations=2, num_samples=2, threads=1)
    demo.run(questions, options, tmp_path)
    assert AutoProcessor.from_pretrained(tmp_path).image_token_id is not None
    assert (tmp_path / "model.safetensors").is_file()
    assert {path.name for path in (tmp_path / "completions").iterdir()} == {
        "completions_00001.parquet",
        "completions_00002.parquet",
        "completions_00002_eval.parquet",
    }
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["options"]["steps"] == 2
    assert metrics["before"]["k"] == 2
    before, after = read_run(tmp_path).records("eval")
    assert (before.step, after.step) == (0, 2)
    asked = [{completion.question for completion in record.completions} for record in (before, after)]
    assert len(asked[0]) == 8
    assert asked[0] == asked[1]
    assert len(json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]) >= 2
