"""One file for each public set, a function `read` that yields questions.

Read `aokvqa.py`, then `easy_vqa.py` (several questions to an image), `mmmu_pro.py` (several images), `nlvr.py` (boxes),
`arxivqa.py` (three tables joined) and `jsonl.py` (files of the user's own).
"""
