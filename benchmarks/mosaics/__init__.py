"""Questions that need a zoom: which digit stands at a place of a mosaic that is too small to read at first sight.

Read `task.py` (mosaics of handwritten digits), `model.py` (a tiny model that can call the tool), `runs.py` (one model,
trained by one method), then `__main__.py` (missing runs, and the page).
"""
