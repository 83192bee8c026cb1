"""What reaches the trackers through `report_to`, read back from where they keep it."""

import pytest
from support.launching import results_of
from support.trainers import config

from vgr_trl import DAPOTrainer
from vgr_trl.demo.demo import draw_questions, to_dataset, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.rewards import accuracy_reward, vgr_reward


def train(folder):
    """What two steps and an evaluation log, but for the summary at the end, and what trackio holds of them."""
    rows = draw_questions(12, seed=0, split="train", multiple_choice=False)
    model, processor = build_tiny_vlm(words_of(rows), hidden_size=32, vision_depth=1)
    options = config(
        folder / "out", max_steps=2, max_completion_length=4, per_device_eval_batch_size=8, eval_strategy="steps",
        eval_steps=2, log_completions=True, num_completions_to_print=0, token_weights=True, replay_buffer_size=2,
        report_to=["trackio"], project="tiny", run_name="first", trackio_static_space_id=False,
    )  # fmt: skip
    data, rewards = (to_dataset(rows[:8]), to_dataset(rows[8:])), [accuracy_reward, vgr_reward]
    trainer = DAPOTrainer(model, rewards, options, *data, processing_class=processor)
    trainer.train()
    from trackio.sqlite_storage import SQLiteStorage

    return trainer.state.log_history[:-1], SQLiteStorage.get_logs("tiny", "first")


def test_every_metric_reaches_trackio(tmp_path, monkeypatch):
    """In a process of its own, because trackio reads its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    ((logs, held),) = results_of(train, tmp_path, processes=1)
    found, expected = {}, {}
    for entry in (entry for entry in held if "train/global_step" in entry):
        for name, value in entry.items():
            if name.startswith(("train/", "eval/")):
                found.setdefault(name, {})[int(entry["train/global_step"])] = value
    for entry in logs:
        for name, value in entry.items():
            if name != "step" and isinstance(value, (int, float)):
                called = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                expected.setdefault(called, {})[entry["step"]] = value
    assert {"train/attention/late/vgr", "eval/rewards/vgr_reward/mean", "train/perf/tokens_per_second"} <= set(found)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name
