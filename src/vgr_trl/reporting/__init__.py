"""Records of a run, and their pages: console, Markdown, HTML, notebook (a package for the site's reference)."""
