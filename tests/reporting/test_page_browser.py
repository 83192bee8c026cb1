import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_run import completion, make_run, with_tools

from vgr_trl.data.prompts import SYSTEM_PROMPT
from vgr_trl.reporting.page import write_report

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("chromium is missing: scripts/install_chromium.sh installs it", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
from playwright.sync_api import Browser, Locator, Page, expect  # noqa: E402

PATIENCE = 120_000  # milliseconds, for what never comes; a machine that does much else must not reach it
expect.set_options(timeout=PATIENCE)
Open = Callable[..., Page]
TABS = ("Curves", "Completions", "Same question", "Configuration")
HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\u202eabc\x1b[31m"

CHAT = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
LONG_NAME = "soft_overlong_punishment_reward_of_another_package"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Closed with this module: while it runs, no other test could start an event loop.
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    one, two = make_run(root / "one", steps=6), make_run(root / "two", steps=4, offset=0.1, weight=2.0)
    seeds = [make_run(root / f"seed{seed}", steps=4, offset=seed / 10, seed=seed) for seed in range(3)]
    odd = [completion(root, 0, True, tokens=[HOSTILE, "&lt;b&gt;"], prompt=HOSTILE)]
    named = completion(root, 1, True)  # as what every object of JavaScript inherits, which others must not seem to have
    named.rewards["toString"], named.signals["constructor"] = 0.5, [1.0] * len(named.tokens)
    odd += [named, completion(root, 1, False)]  # a group of two
    again = make_run(root / "again", steps=4, offset=0.2, seed=0)
    hostile = make_run(root / "hostile", steps=1, name=HOSTILE, extra=odd)
    long = make_run(root / "long", steps=4, prompt=CHAT)
    records = long / "rollouts/records-000001.jsonl"
    records.write_text(records.read_text("utf-8").replace('"vgr_reward":', f'"{LONG_NAME}":'), "utf-8")
    tools = make_run(root / "tools", steps=1, extra=[with_tools(root / "tools" / "rollouts")])
    found = {"tools": [tools], "one": [one], "two": [one, two], "hostile": [hostile], "long": [long]}
    found |= {"seeds": [*seeds, two], "again": [seeds[0], again]}
    return {name: write_report(runs, root / f"{name}.html").path for name, runs in found.items()}


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[Open]:
    """Open a page by its name; at the end nothing may have gone wrong in it, and nothing have been loaded."""
    wrong: list[str] = []
    contexts = []

    def show(name: str, tab: str = "Curves", width: int = 1280, scheme: str = "light") -> Page:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.extend([request.url] if request.url.startswith("http") else []))
        page.goto(pages[name].as_uri())
        page.get_by_role("tab", name=tab).click()
        return page

    yield show
    for context in contexts:
        context.close()
    assert wrong == []


def control(page: Page, name: str) -> Locator:
    return page.locator("label", has_text=re.compile(f"^ *{name}\\b")).locator("select")


def tokens(page: Page) -> Locator:
    return page.locator(".token")


def colour(locator: Locator) -> tuple[float, ...]:
    found = locator.evaluate("element => getComputedStyle(element).backgroundColor")
    return tuple(float(part) for part in re.findall(r"[\d.]+", found)[:3])


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_fits_the_screen(opened: Open, width: int, scheme: str) -> None:
    page = opened("long", width=width, scheme=scheme)
    back = colour(page.locator("html"))
    assert (max(back) < 60) if scheme == "dark" else (min(back) > 240)
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page = opened("tools", "Completions", width=width, scheme=scheme)
    page.locator(".list button", has_text="Let me look").click()
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_tokens_are_coloured_by_the_chosen_number(opened: Open) -> None:
    page = opened("one", "Completions")
    token = tokens(page).nth(4)
    label = token.get_attribute("aria-label") or ""
    vgr, before = float(label.rpartition(" ")[2]), colour(token)
    assert label.startswith(" blue, Vision gain ratio ")
    control(page, "Colour tokens by").select_option("advantages")
    expect(token).to_have_attribute("aria-label", re.compile("^ blue, Advantage "))
    advantage = token.get_attribute("aria-label") or ""
    # Wrong: −0.5 / VGR in each token, so blue, while a VGR is blue below 1 and orange above.
    assert float(advantage.rpartition(" ")[2].replace("−", "-")) == pytest.approx(-0.5 / vgr, rel=1e-3)
    now = colour(token)
    assert now[2] > now[0]
    assert now != before
    control(page, "Colour tokens by").select_option("Signal place")
    expect(token).to_have_attribute("aria-label", " blue, Signal place 4")
    control(page, "Colour tokens by").select_option("Credit rule odd")
    expect(token).to_have_attribute("aria-label", " blue, Credit rule odd 0")


def heat(page: Page, image: int = 0) -> list[int]:
    script = """async element => {
        const image = new Image();
        image.src = element.getAttribute("href");
        await image.decode();
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.width, image.height];
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        return [...context.getImageData(0, 0, image.width, image.height).data].filter((_, i) => i % 4 === 3);
    }"""
    return page.locator(".heat").nth(image).evaluate(script)


def test_attention_of_the_chosen_token_is_drawn_on_its_cell(opened: Open) -> None:
    page = opened("one", "Completions")
    # Token t looks at cell t alone, with a mass of 0.02 · (t + 1); there are 11 tokens and 12 cells of 3 x 4.
    whole = heat(page)
    assert whole == [*(round(255 * token / 11) for token in range(1, 12)), 0]
    whose = page.locator(".whose")
    expect(whose).to_contain_text("the whole completion looked: 12 %")  # 0.02 · 6, the mean
    # Cell 11 of 12 gets 0.02 · 11 / 11 of a mass of 0.12: 2 times an even share.
    expect(page.locator(".heatbar")).to_contain_text("to 2 × an even share")
    tokens(page).nth(6).click()
    expect(whose).to_contain_text("“</think>” (token 7) looked: 14 %")
    assert heat(page) == [0] * 6 + [255] + [0] * 5
    tokens(page).nth(2).focus()
    page.keyboard.press("Enter")
    expect(whose).to_contain_text("“disc” (token 3)")
    page.keyboard.down("Shift")
    tokens(page).nth(4).click()
    expect(page.locator(".beside svg")).to_have_count(3)  # the image, and the overlays of two tokens


def test_turns_show_their_calls_images_and_attention(opened: Open) -> None:
    page = opened("tools", "Completions")
    page.locator(".list button", has_text="Let me look").click()
    turns = page.locator(".turns li")
    expect(turns).to_have_count(3)
    expect(turns.nth(0)).to_contain_text("zoom(box=[0.0, 0, 0.5, 0.5])")
    expect(turns.nth(0)).to_contain_text("25 % of its attention is on the images")
    assert [turns.nth(number).locator("img").count() for number in range(3)] == [1, 1, 0]
    # Of 24 tokens the policy wrote 3, 3 and 4, with a mass of 0.25, 0.5 and 0.75 each: 0.525 of all.
    expect(page.locator(".whose")).to_contain_text(re.compile(r"the whole completion looked: 5[23]\s%"))
    turns.nth(1).get_by_role("button").click()
    expect(page.locator(".whose")).to_contain_text("turn 2 looked: 50 %")
    expect(turns.nth(1).get_by_role("button")).to_have_attribute("aria-pressed", "true")
    assert heat(page) == [0] * 12, "image 1; turn 2 looks at image 2 alone"
    assert heat(page, 1) == [255, 0, 0, 0]
    assert "token=turn2" in page.url
    tokens(page).nth(0).click()
    expect(page.locator(".whose")).to_contain_text("(token 1) looked: 25 %")


def test_runs_that_differ_by_their_seed_are_one_line_with_its_deviation(opened: Open) -> None:
    page = opened("seeds")
    strips = page.locator(".strip")
    expect(strips).to_have_count(2)
    # Accuracy in training ends at 80, 90 and 100 %: 90 ± 10; the other run has other rewards.
    expect(strips.first).to_contain_text("accuracy_reward x 1, vgr_reward x 1, mean of 3 seeds")
    expect(strips.first).to_contain_text(re.compile(r"→ 90\s%\s± 10(\.0)?\s%"))
    expect(strips.last.locator("h2")).to_have_text("two")
    expect(page.locator(".legend li").first).to_contain_text("mean of 3 seeds")
    page.get_by_label("Mean ± deviation over seeds").uncheck()
    expect(strips).to_have_count(4)


def test_runs_of_one_seed_are_no_mean_of_seeds(opened: Open) -> None:
    expect(opened("again").locator(".strip h2")).to_have_text(["seed0", "again"])


def test_hostile_text_is_shown_as_text(opened: Open) -> None:
    page = opened("hostile", "Completions")
    shown = HOSTILE.replace("\u202e", "⟨U+202E⟩").replace("\x1b", "⟨U+001B⟩")
    page.locator(".list button").nth(-3).click()
    expect(page.locator(".prompt")).to_have_text(shown)
    assert tokens(page).all_inner_texts() == [shown, "&lt;b&gt;"]
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0


def test_a_list_names_questions_and_a_group_stands_side_by_side(opened: Open) -> None:
    """Without the chat template and the system prompt, which all questions have."""
    page = opened("long", "Completions")
    assert re.fullmatch(r"What colour is disc number \d\?", page.locator(".list .asked").first.inner_text())
    page = opened("hostile", "Completions")
    page.locator(".list button").last.click()
    page.get_by_label("All 2 recorded of the group").check()
    expect(page.locator("article.completion")).to_have_count(2)
    page.get_by_label("All 2 recorded of the group").uncheck()
    expect(page.locator("article.completion")).to_have_count(1)
