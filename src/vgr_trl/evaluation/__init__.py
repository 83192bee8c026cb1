"""Accuracy of a model on questions, without training.

Read `evaluate.py`, `asking.py` and `writer.py` (what it asks of the model), `judging.py` and `scores.py` (what the
answers are worth); then `cache.py` (evaluations made before) and `harness.py` (results as another tool reads them).
"""

from vgr_trl.evaluation.asking import blank_image
from vgr_trl.evaluation.evaluate import evaluate
from vgr_trl.evaluation.scores import Evaluation, Scores

__all__ = ["Evaluation", "Scores", "blank_image", "evaluate"]
