"""What a notebook shows of a completion: parsed, so that escaping and structure are those a browser sees."""

import base64
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vgr_trl.reporting.notebook import colour_at, positions, show_completion
from vgr_trl.reporting.records import AttentionMap, Completion, RecordedImage

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "look_at_a_rollout.ipynb"


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffe\uffff"))  # what XML can hold


class Elements:
    """Elements of a view, which is XML too, in order."""

    def __init__(self, html: str) -> None:
        self.found = list(ElementTree.fromstring(html).iter())

    def all(self, tag: str) -> list[tuple[dict[str, str], str]]:
        """Attributes of each element, and the text directly in it."""
        return [
            (element.attrib, "".join([element.text or "", *(child.tail or "" for child in element)]))
            for element in self.found
            if element.tag == tag
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    images = folder / "rollouts" / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (30, 20), (255, 0, 0)).save(images / "red.webp")
    (folder / "secret.webp").write_bytes(b"not for the notebook")
    return folder


def completion(**changed: Any) -> Completion:
    values: dict[str, Any] = {
        "question": "q", "group": 0, "prompt": "<image> which colour?", "text": "red one", "solution": "red",
        "tokens": ["red", " one", "<|im_end|>"], "vgr": [0.5, 1.0, 2.0], "advantages": [1.0, None, -0.5],
        "rewards": {"accuracy": 1.0, "vgr": None}, "reward": 1.0, "correct": True,
        # 30 x 20 pixels, 1 row of 2 cells. Token 0 has 0.2 and 0.4 on them, token 1 0.3 and 0, token 2 nothing.
        "images": [RecordedImage("images/red.webp", 30, 20, (1, 2))],
        "attention": AttentionMap([0.4, 0.3, 0.0], bytes([127, 255, 255, 0, 0, 0])),
    }  # fmt: skip
    return Completion(**values | changed)


def shown(run: Path, color_by: str = "vgr", token: int | None = None, **changed: Any) -> Elements:
    return Elements(show_completion(completion(**changed), run, color_by, token)._repr_html_())


def test_every_token_has_its_colour_and_says_its_value(run: Path) -> None:
    tokens = shown(run).all("span")
    assert [text for _, text in tokens] == ["red", " one", "<|im_end|>"]
    assert [attributes["title"] for attributes, _ in tokens] == [f"vision gain ratio {v}" for v in ("0.5", "1", "2")]
    for (attributes, _), place in zip(tokens, (-1, 0, 1), strict=True):
        assert f"background:{colour_at(place)}" in attributes["style"]


def test_what_is_missing_has_no_colour_and_says_so(run: Path) -> None:
    tokens = shown(run, "advantages").all("span")
    assert [attributes["title"] for attributes, _ in tokens][1:] == ["advantage not measured", "advantage -0.5"]
    assert "background" not in (tokens[1][0]["style"])
    assert "The weight was not measured." in [text for _, text in shown(run, "weights").all("p")]


def test_reward_solution_and_whether_it_is_right_are_shown(run: Path) -> None:
    (line,) = [text for _, text in shown(run).all("p") if "accuracy" in text]
    assert "1 (accuracy 1, vgr not measured)" in line
    assert line.endswith("red · right")


def test_cells_are_dark_where_nobody_looked(run: Path) -> None:
    # Mean over the three tokens: (0.4 * 127/255 + 0.3) / 3 = 0.1664 and 0.4 / 3 = 0.1333; share 0.5552 and 0.4448.
    cells = [attributes for attributes, _ in shown(run).all("rect")]
    assert [float(cell["fill-opacity"]) for cell in cells] == pytest.approx([0, 0.8 * (1 - 0.1333 / 0.1664)], abs=1e-3)
    titles = [text for _, text in shown(run).all("title")]
    assert titles == [
        "row 1, column 1: 55.5% of the attention on the images",
        "row 1, column 2: 44.5% of the attention on the images",
    ]


def test_the_attention_of_one_token_is_shown(run: Path) -> None:
    page = shown(run, token=1)
    assert [text.split(": ")[1][:6] for _, text in page.all("title")] == ["100.0%", "0.0% o"]
    assert page.all("figcaption")[0][1] == "Image 1: as it is, and lit where token 1 looked"
    assert shown(run, token=-2).all("title") == page.all("title")
    assert shown(run, token=2).all("rect") == []  # it looked nowhere


def test_cells_run_over_several_images_in_row_order(run: Path) -> None:
    images = [RecordedImage("images/red.webp", 10, 10, (1, 1)), RecordedImage("images/red.webp", 20, 10, (2, 1))]
    attention = AttentionMap([0.6] * 3, bytes([255, 0, 85] * 3))
    titles = [text for _, text in shown(run, images=images, attention=attention).all("title")]
    assert [title.split(" of ")[0] for title in titles] == [
        "row 1, column 1: 75.0%",
        "row 1, column 1: 0.0%",
        "row 2, column 1: 25.0%",
    ]


def test_the_view_holds_its_images_and_asks_for_nothing_else(run: Path) -> None:
    page = shown(run)
    kind, data = (page.all("image")[0][0]["href"]).split(",")
    assert kind == "data:image/webp;base64"
    assert base64.b64decode(data) == (run / "rollouts" / "images" / "red.webp").read_bytes()
    assert {element.tag for element in page.found}.isdisjoint({"script", "link", "img", "iframe", "style"})


@pytest.mark.parametrize("file", [None, "images/none.webp", "../secret.webp", "images/../../secret.webp"])
def test_a_thumbnail_that_is_missing_or_elsewhere_is_left_out(run: Path, file: str | None) -> None:
    page = shown(run, images=[RecordedImage(file, 30, 20, (1, 2))])
    assert page.all("image") == []
    assert "its thumbnail is missing" in page.all("figcaption")[0][1]


@given(text=TEXT, token=TEXT)
def test_no_text_changes_the_structure(run: Path, text: str, token: str) -> None:
    page = shown(run, prompt=text, solution=text, tokens=[token, text, "end"], rewards={text: 1.0})
    assert [(element.tag, list(element.attrib)) for element in page.found] == [
        (element.tag, list(element.attrib)) for element in shown(run).found
    ]


def test_what_does_not_show_is_written_as_its_number(run: Path) -> None:
    page = shown(run, tokens=["<b", '">', "\n\u202e\x00"])
    assert [text for _, text in page.all("span")] == ["<b", '">', "↵\n⟨U+202E⟩⟨U+0000⟩"]


def test_positions_by_hand() -> None:
    # ln 4 is the farthest: ln 2 is half of it, and 1/4 as far on the other side.
    assert positions([1.0, 2.0, 4.0, 0.25, None], is_ratio=True) == pytest.approx([0, 0.5, 1, -1, None])
    assert positions([0.0, 1.0, -4.0, None], is_ratio=False) == [0, 0.25, -1, None]
    assert positions([0.0, 2.0, 1.0], is_ratio=True) == [-1, 1, 0]  # a ratio of 0 does not stretch the scale
    assert positions([1.0, 1.0], is_ratio=True) == [0, 0]


@given(st.floats(-1, 1))
def test_black_is_readable_on_every_colour(position: float) -> None:
    # Contrast with black as WCAG 2 defines it, by the relative luminance of sRGB.
    parts = [int(colour_at(position)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    assert (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05) / 0.05 >= 4.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of jupyter's packages
def test_the_notebook_trains_and_shows_what_was_looked_at(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from traitlets.config import Config

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    with TemporaryDirectory() as sockets:  # by TCP it would be told ports that another process may take before it does
        local = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        nbclient.NotebookClient(notebook, timeout=900, startup_timeout=900, resources=where, config=local).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    views = [Elements(output.data["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    assert len(views) == 3
    for view in views:
        assert not any("not measured" in (attributes["title"]) for attributes, _ in view.all("span"))
        assert len(view.all("image")) == 2
        assert len(view.all("rect")) == 4  # a 56 x 56 image has 2 x 2 vision tokens
    assert "step 4: 8 completions recorded" in "".join(output.get("text", "") for output in outputs)
