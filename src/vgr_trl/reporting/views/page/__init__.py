"""Runs as one page of HTML.

Read `run_sources.py`, `curves.py`, `choosing_records.py`, `page_data.py`, then `html.py`, which puts their data into
the built `page.html`.
"""
