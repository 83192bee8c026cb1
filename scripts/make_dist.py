"""Build sdist and wheel from a copy of the tree in which README.md and project.urls have absolute links.

python scripts/make_dist.py https://github.com/OWNER/NAME TAG OUT [flags of `python -m build`]
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")  # a relative target, without its anchor


def main(repository: str, tag: str, out: str, *flags: str) -> None:
    """Copy the files that git knows, fill in the addresses, and build."""

    def address(target: str) -> str:
        kind = "raw" if Path(target).suffix in (".png", ".svg") else "tree" if (ROOT / target).is_dir() else "blob"
        return f"{repository}/{kind}/{tag}/{target}"

    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.split("\0")):
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name, follow_symlinks=False)
        readme = Path(folder) / "README.md"
        readme.write_text(LINK.sub(lambda link: address(link[1]), readme.read_text("utf-8")), encoding="utf-8")
        urls = {"Homepage": repository, "Source": repository, "Issues": f"{repository}/issues"}
        urls |= {"Documentation": address("docs/index.md"), "Changelog": address("CHANGELOG.md")}
        with (Path(folder) / "pyproject.toml").open("a", encoding="utf-8") as project:
            project.write("\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items()))
        subprocess.run([sys.executable, "-m", "build", *flags, "--outdir", Path(out).absolute(), folder], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
