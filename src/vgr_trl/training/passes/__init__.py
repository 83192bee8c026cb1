"""What passes of a model compute, and what they leave out.

Read `score.py` (which passes there are), `around.py` (prompts and images once, for every pass), `skip.py` (training
passes over what the loss reads), `budget.py` (micro-batches by number of tokens).
"""
