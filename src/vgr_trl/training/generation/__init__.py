"""What is around TRL's generation of completions.

Read `generate.py`, then `noisy.py` (some completions are made for a perturbed image), `blind.py` (answers without it),
`eval_sampling.py` (how evaluations sample), `server.py` (a server of vLLM).
"""
