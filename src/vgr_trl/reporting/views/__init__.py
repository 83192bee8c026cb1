"""What records and logs look like.

The page: `run_sources.py`, `curves.py`, `choosing_records.py`, `page_data.py`, then `html.py`, which puts their data
into the built `page.html`. Markdown: `markdown_text.py`, `markdown.py`, `markdown_logs.py`. Others: `console.py`,
`notebook.py` with `colours.py`, `boxes.py`, `model_card.py` with `papers.py`.
"""
