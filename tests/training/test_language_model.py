"""A step with a model that has a language, where `make evidence-model` has brought its weights."""

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="gguf is not installed: make evidence-model")
FOLDER = Path(__file__).parents[2] / ".gpu" / "smollm2"


@pytest.mark.minutes
@pytest.mark.skipif(not any(FOLDER.glob("*.gguf")), reason="SmolLM2 is missing: make evidence-model")
def test_a_step_in_words_is_checked_rewarded_and_shown(tmp_path, monkeypatch):
    """Its tokenizer, chat template and prose pass the check of the pixels, the reward and the report."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from evidence.model import WordyStart
    from teacher.runs import Method, Settings

    from vgr_trl.reporting.page import write_report
    from vgr_trl.reporting.records import read_run

    settings = Settings(reading_steps=1, test_rows=2, course_rows=2, steps=4, prompts=1, learning_rate=5e-5)
    start = WordyStart(0, settings, tmp_path / "starts", FOLDER, "cpu", batch=2)
    options = {"max_steps": 1, "check_pixels": True, "rollout_log_steps": 1, "compute_attention_metrics": True}
    trainer = start.trainer(Method(options), tmp_path / "run")
    trainer.train()
    (record,) = read_run(tmp_path / "run").records("train")
    assert {completion.rewards["accuracy_reward"] for completion in record.completions} <= {0.0, 1.0}
    assert all(len(completion.vgr) == len(completion.tokens) for completion in record.completions)
    assert write_report([tmp_path / "run"], tmp_path / "page.html")
    assert "Say in a sentence" in record.completions[0].prompt
