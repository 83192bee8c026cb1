"""What is around TRL's generation of completions.

Read `generate.py`, then `eval_sampling.py` (how evaluations sample).
"""
