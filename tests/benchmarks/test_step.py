"""The benchmark of steps: its rollouts, its limit on paper, and one small step counted."""

import pytest


def test_lengths_are_log_normal_with_a_mean_of_two_fifths(module):
    rollout = module("step_cases").cases()
    for name in ("b", "c"):
        lengths, longest = rollout[name].lengths, rollout[name].size.completion
        assert len(lengths) == 40
        assert sum(lengths) / 40 == pytest.approx(0.4 * longest, rel=0.01)
        assert max(lengths) == longest
        assert min(lengths) < 0.15 * longest
    assert rollout["a"].lengths == [128] * 8


def test_the_limit_of_one_prompt_by_hand(module):
    """One layer, two completions of 2 and 3 tokens behind a prompt of 5, all weights trained; no image.

    7 tokens enter the layer besides those that only end a completion: 5 + 1 + 2. Four of them emit (the last of the
    prompt, 1, 2); in a last layer the other 4 give keys and values only. Keys seen by those that emit: 5 by the last of
    the prompt, 6 by the second token of each completion, 7 by the third.
    """
    models, cases, limit = module("sharing_models"), module("step_cases"), module("step_limit")
    shape = models.ModelShape(8, 1, 2, 1, 16, 32, 8, 1, 16, 2, (0,))
    tokens = limit.Tokens(1, [2, 3], heads=5)
    weights, attention = limit._layers(shape, models.Size(5, 0, 3, 2), tokens)
    layer = 8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16  # queries, outputs, keys, values; MLP
    assert weights == 2 * (4 * layer + 4 * 8 * 4 * 2)
    assert attention == 4 * 2 * 4 * (5 + 6 + 6 + 7)
    case = cases.Case("", models.Size(5, 0, 3, 2), 1, 0, False, False, shape, {})
    weights, attention = limit._layers(shape, case.size, limit.Tokens(1, [3, 3], heads=6))
    head = 2 * 8 * 32 * 6
    assert sum(limit.update_limit(case).values()) == 3 * (weights + head) + 3.5 * attention
    tower = case.prompts * sum(limit._tower(shape, case.size).values())
    assert limit.signals_limit(case) - limit.step_limit(case) == weights + attention + head + tower


def test_a_step_is_counted_and_near_its_limit(module):
    """All rows alive and of full length: what is left above the limit are keys that are not seen and a last layer."""
    runs, limit = module("step_runs"), module("step_limit")
    place = runs.Place(quick=True)
    case = place.case("a")
    operations = runs.Operations(case.shape)
    run = runs.StepRun(place, case, "ours", operations.read)
    with operations.counter:
        found = run()
    needed = limit.update_limit(case)
    assert found["update"]["head"] == needed["head"] * 4 / 3  # TRL's computes its logits again for their gradients
    assert needed["attention"] < found["update"]["attention"] < 1.7 * needed["attention"]
    assert found["update"]["products"] == pytest.approx(needed["layers"] + needed["tower"], rel=0.1)
    assert sum(needed.values()) < found["update"]["together"] < 1.15 * sum(needed.values())
    assert limit.step_limit(case) < found["step"]["together"] < 1.15 * limit.step_limit(case)


def test_the_page_has_ratios_goals_and_limits(module):
    results, runs = module("step_results"), module("step_runs")
    place = runs.Place(quick=True)
    counts = {"operations": {"step": {"together": 4e9}, "update": {"together": 3e9, "head": 2e9}}}
    counts["bytes"] = {"update": 2e6, "step": 3e6}
    seconds = {
        "trl": [{"step": 9.0, "update": 4.0}] * 3,
        "ours": [{"step": 3.0, "update": one} for one in (1.0, 2.0, 8.0)],
    }
    found = {
        "machine": {"cores": 2},
        "place": vars(place),
        "cases": {
            "a": {
                "seconds": seconds,
                "counts": {"trl": counts, "ours": {**counts, "bytes": {"update": 1e6, "step": 3e6}}},
            }
        },
    }
    page = results.page(found, place)
    update = next(line for line in page.splitlines() if line.startswith("| a | update |"))
    assert "**0.500** (4.00 → 2.00 s) | ≤ 0.14 | **0.500** (2.00 → 1.00 MB) | ≤ 0.25 | **1.000**" in update
    assert "| a | 0.00 of" in page
    assert "**0.333** (9.00 → 3.00 s) | ≤ 0.21" in page
