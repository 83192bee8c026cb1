"""Rollouts as Markdown: `elements.py` (what must not become Markdown), `sections.py`, `logs.py` (files of a run)."""
