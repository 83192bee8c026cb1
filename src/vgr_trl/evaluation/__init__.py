"""Accuracy of a model on questions, without training.

Read `evaluate.py`, `generation.py` (what it asks of the model), `scores.py` (what it found).
"""

from vgr_trl.evaluation.evaluate import blank_image, evaluate
from vgr_trl.evaluation.scores import Evaluation, Scores

__all__ = ["Evaluation", "Scores", "blank_image", "evaluate"]
