"""Records of a run, and their pages: console, Markdown, HTML, notebook. A package by this file, for the site's reference."""
