"""What runs with no download: a real vision-language model of a third of a million parameters, and drawn questions.

Read `run.py` (the whole demo on one page) with its `options.py`, then what it calls: `shapes.py` (questions),
`dataset.py`, `tiny_vlm.py` and `tiny_processor.py` (the model), `warm_start.py`, `reinforce.py`, `comparison.py`.
`write_folder.py` leaves the model as files for other commands.
"""
