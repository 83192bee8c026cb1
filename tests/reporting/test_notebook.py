import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.made_records import completion

from vgr_trl.reporting.console import position_colour
from vgr_trl.reporting.notebook import show_completion
from vgr_trl.reporting.records import AttentionMap, RecordedImage

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(
    path for path in FOLDER.glob("*.ipynb") if path.stem != "better_look_without_boxes"
)  # that of a benchmark
# In the place of the cell that is tagged `parameters`: a warm start that ends at once, and one step.
SHORT = "options = Options(steps=1, text_steps=1, caption_loss=9, warm_start_accuracy=0, num_samples=1); seeds = [0]"

# A free GPU, a model and data of the hub become a CPU, the tiny model and its questions, whole or not.
TINY = """
from pathlib import Path
from vgr_trl.demo.write_folder import write_folder

write_folder(Path("tiny"), train=64, text_steps=1)
model, data = "tiny/model", "tiny/train.parquet"
more = "--system_prompt_file none --max_completion_length 4 --per_device_train_batch_size 8".split()
more += "--gradient_accumulation_steps 1 --max_steps 1 --eval_steps 1 --save_steps 1 --max_test_rows 2".split()
"""

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffe\uffff"))  # what XML can hold


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    images = folder / "rollouts" / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (30, 20), (255, 0, 0)).save(images / "red.webp")
    return folder


def shown(run: Path, **changed: Any) -> ElementTree.Element:
    values: dict[str, Any] = {
        "prompt": "<image> which colour?", "text": "red one", "solution": "red",
        "tokens": ["red", " one", "<|im_end|>"], "vgr": [0.5, 1.0, 2.0], "advantages": [1.0, None, -0.5],
        "rewards": {"accuracy": 1.0, "vgr": None}, "reward": 1.0, "correct": True,
        # 30 x 20 pixels, 1 row of 2 cells. Token 0 has 0.2 and 0.4 on them, token 1 0.3 and 0, token 2 nothing.
        "images": [RecordedImage("images/red.webp", 30, 20, (1, 2))],
        "attention": AttentionMap([0.4, 0.3, 0.0], bytes([127, 255, 255, 0, 0, 0])),
    }  # fmt: skip
    return ElementTree.fromstring(show_completion(completion(**values | changed), run)._repr_html_())


def test_every_token_has_its_colour_and_says_its_value(run: Path) -> None:
    tokens = list(shown(run).iter("span"))
    assert [token.text for token in tokens] == ["red", " one", "<|im_end|>"]
    assert [token.attrib["title"] for token in tokens] == [f"vision gain ratio {value}" for value in ("0.5", "1", "2")]
    for token, place in zip(tokens, (-1, 0, 1), strict=True):
        assert f"background:{position_colour(place)}" in token.attrib["style"]


def test_cells_are_dark_where_nobody_looked(run: Path) -> None:
    # Mean over the three tokens: (0.4 * 127/255 + 0.3) / 3 = 0.1664 and 0.4 / 3 = 0.1333; share 0.5552 and 0.4448.
    opacities = [float(cell.attrib["fill-opacity"]) for cell in shown(run).iter("rect")]
    assert opacities == pytest.approx([0, 0.8 * (1 - 0.1333 / 0.1664)], abs=1e-3)
    titles = [str(title.text).split(" of ")[0] for title in shown(run).iter("title")]
    assert titles == ["row 1, column 1: 55.5%", "row 1, column 2: 44.5%"]


@given(text=TEXT, token=TEXT)
def test_no_text_changes_the_structure(run: Path, text: str, token: str) -> None:
    page = shown(run, prompt=text, solution=text, tokens=[token, text, "end"], rewards={text: 1.0})
    plain, hostile = ([(each.tag, list(each.attrib)) for each in view.iter()] for view in (shown(run), page))
    assert hostile == plain


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of jupyter's packages
@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.minutes)], ids=["short", "whole"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, short: bool, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    is_tiny = path.stem == "free_gpu"
    cell.source = TINY if is_tiny else SHORT if short else cell.source
    where = {"metadata": {"path": str(tmp_path)}}
    with TemporaryDirectory() as sockets:  # by TCP it would be told ports that another process may take before it does
        local = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        nbclient.NotebookClient(notebook, timeout=1800, startup_timeout=900, resources=where, config=local).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    if path.stem == "your_own_method":
        assert re.search(r"^looking .* over plain, by seed: [+-]", printed, re.MULTILINE)
        return
    if is_tiny:
        assert "on 2 rows (step 0 → 1)" in printed, "what the notebook tells to expect"
        assert "<rect" in outputs[-1].data["text/html"], "the cells of the image"
        return
    (html,) = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "–" not in html  # the sign of what was not measured
    assert html.count("<rect") == 4  # a 56 x 56 image has 2 x 2 vision tokens
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", printed))
    assert short or after > before + 0.05
