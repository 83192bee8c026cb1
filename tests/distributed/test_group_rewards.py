import statistics

import group_rewards
import pytest
from support.launching import results_of


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_reward_sees_whole_groups_however_they_are_spread(processes, text_model, text_tokenizer, tmp_path):
    model_folder = tmp_path / "model"
    text_model.save_pretrained(model_folder)
    text_tokenizer.save_pretrained(model_folder)
    result = results_of(group_rewards.train, model_folder, tmp_path, 4 // processes, processes=processes)[0]
    rows = result["rows"]
    texts = rows["completion"]
    assert rows["text_seen"] == texts, "each process got back its own slice, in order"
    ranks = [sorted(texts).index(text) / 4 for text in texts]
    assert rows["reward"] == pytest.approx(ranks)
    assert rows["scored"] == [4 * rank for rank in ranks], "a file in EasyR1's form sees the batch of all processes"
    assert {entry["reward/rows"] for entry in result["history"]} == {4.0}
    assert len(set(ranks)) > 1
    mean, deviation = statistics.mean(ranks), statistics.stdev(ranks)
    expected = [2 * (rank - mean) / (2 * deviation + 1e-4) for rank in ranks]
    assert rows["advantage"] == pytest.approx(expected, abs=1e-5)
    assert [entry["reward_weights/rank_reward"] for entry in result["history"]] == [1.0, 2.0, 2.0]
    for entry in result["history"]:
        assert entry["reward"] == pytest.approx(
            entry["rewards/rank_reward/mean"] * entry["reward_weights/rank_reward"], abs=1e-6
        )
        assert {"timing/generation", "timing/reward", "timing/update", "timing/optimizer"} <= set(entry["timings"])
        in_step = sum(value for name, value in entry["timings"].items() if name != "timing/optimizer")
        assert in_step == pytest.approx(entry["step_time"], rel=1e-3) or processes > 1, "the stages make up the step"
        assert in_step > 0.9 * entry["step_time"]
        assert entry["perf/samples_per_second"] * entry["step_time"] == pytest.approx(4)
