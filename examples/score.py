"""A reward file of EasyR1 and MTRL: accuracy and form of each completion of a batch."""

import re

REWARD_NAME, REWARD_TYPE = "shapes", "batch"


def compute_score(reward_inputs, format_weight=0.1):
    """Return the scores of each completion; `overall` is the reward."""
    scores = []
    for row in reward_inputs:
        found = re.fullmatch(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", row["response"], re.DOTALL)
        accuracy = float(found is not None and found[1].strip().lower() == str(row["ground_truth"]).strip().lower())
        form = float(found is not None)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "accuracy": accuracy, "format": form})
    return scores
