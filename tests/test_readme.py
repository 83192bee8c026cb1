"""README.md and README_zh.md say the same, and what they link to is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README_zh.md"))


def in_step(text: str) -> dict[str, list[str]]:
    return {
        "code": [re.sub(r" *#.*", "", block) for block in re.findall(r"```.*?```", text, re.DOTALL)],
        "links": sorted(link.replace("docs/zh/", "docs/") for link in re.findall(r"\]\(((?!README)[^)]+)\)", text)),
        "levels": re.findall(r"^#+(?= )", text, re.MULTILINE),
        "rows": re.findall(r"^\|", text, re.MULTILINE),
        "figures": sorted(re.findall(r"\d+\.\d+", text)),
    }


def test_the_chinese_page_is_in_step():
    assert in_step(CHINESE) == in_step(ENGLISH)


def test_links_lead_to_files():
    for link in in_step(ENGLISH)["links"]:
        assert link.startswith("https://") or (ROOT / link.partition("#")[0]).exists(), link
