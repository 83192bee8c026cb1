"""Accuracy of a model on questions, without training."""

from vgr_trl.evaluation.evaluate import blank_image, evaluate
from vgr_trl.evaluation.scores import Evaluation, Scores

__all__ = ["Evaluation", "Scores", "blank_image", "evaluate"]
