"""Sets converted to one schema, and merged.

Read `convert.py` with `encode.py`, `pool.py` (processes that encode), `write.py` (files) and `progress.py` (what a kill
leaves); `converters.py` with `sets/`, `select.py` and `shuffle.py` (questions); `merge.py` with `merge_plan.py`; then
`statistics.py`, `answers.py` and `plot.py` (what a set consists of).
"""
