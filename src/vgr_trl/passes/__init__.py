"""Forward passes of a run.

`run_pass.py`: `ForwardPasses.run_pass`, which makes every pass for a stated `Purpose`. `loss_mask.py`: loss masks and
windows. `skipping.py`: rows, columns and tokens that training passes skip. `parts.py`: micro-batches cut by a budget.
`joining.py`: micro-batches joined into passes of whole groups. `row_order.py`: the order of rows in micro-batches.
`Want`, `Scores` and `score` stand in `signals/scoring.py`, where `RolloutScorer` uses them without a trainer.
"""
