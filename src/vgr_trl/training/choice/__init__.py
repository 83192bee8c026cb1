"""Which groups are trained on.

Read `choose.py`, then what it calls: `further_prompts.py` (dynamic sampling), `replay.py` (the buffer) and
`greedy_baseline.py` (ReMax).
"""
