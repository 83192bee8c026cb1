"""Hooks of mkdocs: add pages of benchmarks, rewrite links, unescape pipes, write llms.txt and pages as Markdown."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PAGES: dict[str, str] = {}  # source of a page -> its Markdown, with links between pages
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
            linked = f"{text}({config.repo_url}/{'tree' if path.is_dir() else 'blob'}/HEAD/{name}{anchor})"
            on_github = config.repo_url.startswith("https://github.com/") and path.suffix == ".ipynb"
            colab = config.repo_url.replace("github.com", "colab.research.google.com/github", 1)
            return f"{linked} ([open in Colab]({colab}/blob/HEAD/{name}))" if on_github else linked
        shown = text[1:-1]
        return shown if shown.strip("`") == name else f"{shown} (`{name}`)"

    PAGES[page.file.src_uri] = LINK.sub(rewritten, markdown)
    return PAGES[page.file.src_uri]


def on_post_build(config: Any) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt, which lists them, for readers that are programs."""
    site, listed = Path(config.site_dir), []
    for uri, text in PAGES.items():
        file = site / uri
        file.parent.mkdir(parents=True, exist_ok=True)
        if "\n::: " in text:  # filled in from docstrings: as HTML only
            uri = uri.removesuffix(".md") + "/"
        else:
            file.write_text(text, encoding="utf-8")
        title = next((line[2:] for line in text.splitlines() if line.startswith("# ")), uri)
        prose = (line for line in text.split("\n\n") if re.match(r"(?!```)[^\s#|!<:-]", line))
        about = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", next(prose, "")).replace("\n", " ").partition(". ")[0]
        listed.append(f"- [{title}]({uri}): {about[:200]}")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", "", *listed, ""]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    r"""Show `\|` in the code of a table as a pipe, as GitHub does."""
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html)
