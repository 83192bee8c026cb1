"""Records of rollouts in the folder of a run.

Read `record.py` (what a record holds), `json_lines.py` (how it is written down), `record_files.py`, `log_file.py` and
`recorded_run.py`; then `pieces.py`, `thumbnails.py` (tokens and images of a record) and `background.py` (the thread
that writes).
"""
