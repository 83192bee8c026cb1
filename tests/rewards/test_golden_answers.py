"""The accuracy reward on outputs in the manner of 13 model families, each with a person's verdict (answers.jsonl)."""

import json
from collections import Counter
from pathlib import Path

from vgr_trl.rewards import accuracy_reward

LINES = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()]


def test_the_reward_agrees_with_a_person_and_no_wrong_output_earns_it():
    columns = [[line[name] for line in LINES] for name in ("output", "solution", "choices")]
    found = [reward == line["right"] for reward, line in zip(accuracy_reward(*columns), LINES, strict=True)]
    rewarded = [line for line, agrees in zip(LINES, found, strict=True) if not line["right"] and not agrees]
    assert rewarded == []
    assert sum(found) >= 0.93 * len(LINES)
    for part in ("family", "kind"):
        totals = Counter(line[part] for line in LINES)
        agreeing = Counter(line[part] for line, agrees in zip(LINES, found, strict=True) if agrees)
        assert {name: agreeing[name] for name in totals if agreeing[name] < 0.85 * totals[name]} == {}
