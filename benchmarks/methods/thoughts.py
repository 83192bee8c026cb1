"""Whether thoughts are right, and answers follow from them."""

import statistics

from methods.tasks import Families, Task
from vgr_trl.demo.demo import Rows
from vgr_trl.evaluation import Evaluation


def in_thoughts(seen: Evaluation, rows: Rows, task: Task) -> dict[str, float]:
    """Return shares of sampled texts, in [0, 1].

    thoughts: of all words that are to be read off the images, those in the thought. asked: thoughts with the word that
    is asked for. follows: answers that are the thought's word of the family that is asked for, right or wrong. filler:
    of the filler that can be wrong, what is right; 0 where there is none of it.
    """
    families = task.families
    right, asked, follows, filler = list[bool](), list[bool](), list[bool](), list[bool]()
    for row, record in zip(rows, seen.records, strict=True):
        truth, family = perceived_words(row["thought"], families), families[row["family"]]
        for text in record["sampled"]:
            thought, _, rest = text.removeprefix("<think>").partition("</think>")
            said = perceived_words(thought, families)
            right += [word in said for word in truth]
            asked.append(row["solution"] in said)
            follows.append(rest.removeprefix("<answer>").partition("</answer>")[0] in said.intersection(family))
            if task.filler_right:
                filler += task.filler_right(thought.split(), row["thought"].split())
    shares = {"thoughts": right, "asked": asked, "follows": follows} | ({"filler": filler} if task.filler_right else {})
    return {name: round(statistics.mean(values or [False]), 4) for name, values in shares.items()}


def perceived_words(thought: str, families: Families) -> set[str]:
    """Return the words of a thought that are read off the image."""
    return {word for family in families.values() for word in family}.intersection(thought.split())
