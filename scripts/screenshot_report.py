"""Take the picture at the head of the README: a page of `vgr-trl report` at one of its completions, in Chromium.

vgr-trl demo --output_dir /tmp/demo && vgr-trl report /tmp/demo --output /tmp/demo.html
python scripts/screenshot_report.py /tmp/demo.html docs/images/report.png

Of the demo and not of NLVR, because the images of NLVR are others' (CC-BY-4.0), and no data of others are committed
here, in pictures neither; the shapes of the demo are drawn by this library.
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

WIDTH = 1180
PARTS = {"": 650, "#tab=Completions&answer=right&token=3": 730}  # place in the page → pixels that are shown of it


def screenshots(page: Page, report: Path) -> list[Image.Image]:
    """Return what a reader sees first of each part."""
    taken = []
    for part, height in PARTS.items():
        page.set_viewport_size({"width": WIDTH, "height": height})
        page.goto("about:blank")
        page.goto(report.resolve().as_uri() + part)
        page.locator("canvas, .heat").first.wait_for()
        page.wait_for_timeout(500)
        taken.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="page that `vgr-trl report` has written")
    parser.add_argument("output", type=Path, help="PNG")
    args = parser.parse_args()
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-browser"), chromium_sandbox=False
        )
        taken = screenshots(browser.new_page(), args.report)
        browser.close()
    whole = Image.new("RGB", (WIDTH, sum(part.height for part in taken)), "white")
    top = 0
    for part in taken:
        whole.paste(part, (0, top))
        top += part.height
    args.output.parent.mkdir(parents=True, exist_ok=True)
    whole.save(args.output, optimize=True)


if __name__ == "__main__":
    main()
