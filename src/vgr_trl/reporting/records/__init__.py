"""Records of rollouts in the folder of a run.

Read `format.py` (what a record holds), `json_lines.py` (how it is written down), `writing.py`, `log_file.py` and
`reading.py`; then `pieces.py`, `thumbnails.py` (tokens and images of a record) and `background.py` (the thread that
writes).
"""
