"""What passes of a model compute, and what they leave out.

Read `skip.py` (passes with gradients, over what the loss reads), `score.py` (those without), `around.py` (prompts and
images once, for every pass) with `blank_image.py` and `emitted.py` (what is read off beside), `budget.py` (parts of
micro-batches by number of tokens).
"""
