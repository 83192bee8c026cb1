"""What a person sees of a run: records of its rollouts, and what is made of them.

`records.py` writes and reads them, `recorder.py` takes them while a run goes on; from them come `markdown.py` (and the
terminal), `page.py` and `notebook.py`. `model_card.py` says how a model was trained, `collapse.py` whether a run
collapses, `verl_names.py` what verl calls the metrics.
"""
