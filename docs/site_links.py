"""Hooks of mkdocs: add pages of benchmarks, rewrite links to other files as paths or addresses, unescape pipes."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures of benchmarks, at the same path."""
    for path in (*sorted(RESULTS.iterdir()), RESULTS.parent / "findings.md"):
        if path.suffix in (".md", ".png"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite links from places in the repository to places on the site; `--strict` refuses dead links, which stay."""
    source = Path(str(page.file.abs_src_path))

    def rewritten(match: re.Match[str]) -> str:
        text, anchor = match["text"], match["anchor"] or ""
        path = Path(os.path.normpath(source.parent / match["target"]))
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]
        on_site = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
        if files.get_file_from_path(on_site) is not None:
            here = os.path.dirname(page.file.src_uri)
            return f"{text}({os.path.relpath(on_site, here)}{anchor})"
        name = path.relative_to(ROOT).as_posix()
        if config.repo_url:
            return f"{text}({config.repo_url}/{'tree' if path.is_dir() else 'blob'}/HEAD/{name}{anchor})"
        shown = text[1:-1]
        return shown if shown.strip("`") == name else f"{shown} (`{name}`)"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    r"""Show `\|` in the code of a table as a pipe, as GitHub does."""
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html)
