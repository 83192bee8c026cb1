"""Take the picture at the head of the README: one completion on a page of `vgr-trl report`, in Chromium.

vgr-trl demo --output_dir /tmp/demo && vgr-trl report /tmp/demo --output /tmp/demo.html
python scripts/screenshot_report.py /tmp/demo.html docs/images/report.png

Of the demo and not of NLVR, because the images of NLVR are others' (CC-BY-4.0), and no data of others are committed
here, in pictures neither; the shapes of the demo are drawn by this library.
"""

import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PLACE = "#tab=Completions&when=eval-100&answer=right&token=3"  # the word that names the colour
WIDTH = 1180  # of the window, in CSS pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="page that `vgr-trl report` has written")
    parser.add_argument("output", type=Path, help="PNG")
    parser.add_argument("--place", default=PLACE, help=f"which completion and token (default {PLACE})")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-browser"), chromium_sandbox=False
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=1.5)
        page.goto(args.report.resolve().as_uri() + args.place)
        page.add_style_tag(content=".facts, .choices { display: none !important } .completion { padding: 12px }")
        page.locator(".heatbar").wait_for()
        page.wait_for_timeout(500)  # of scrolling and decoding
        page.locator(".completion").screenshot(path=args.output)
        browser.close()
    with Image.open(args.output) as taken:
        taken.convert("RGB").save(args.output, optimize=True)


if __name__ == "__main__":
    main()
