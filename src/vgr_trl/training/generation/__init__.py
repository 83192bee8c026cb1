"""What is around TRL's generation of completions.

Read `generate.py`, then `noisy.py` (some completions are made for a perturbed image), `eval_sampling.py` (how
evaluations sample).
"""
