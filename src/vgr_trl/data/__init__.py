"""How a data set becomes prompts.

`read/`: rows of files and of the hub. `rows/`: a row, its images and its question, checked and written down for the
model; what training reads. `build/`: sets converted to one schema and merged. `inspect/`: what is wrong with a set, and
what it costs, before training.
"""
