"""How a data set becomes prompts.

From the ground up: `rows/` (a row, its images and its question, checked and written down for the model), `read/` (rows
of files), `build/` (sets converted to one schema and merged), then what training reads: `load.py`, `joined.py`,
`held_out.py`. `inspect/`: what is wrong with a set, and what it costs, before training.
"""
