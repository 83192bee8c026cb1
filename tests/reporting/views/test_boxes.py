"""Attention in boxes: expected values are derived by hand; the last tests hold the grid against a real model."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.reporting.page import area_share, attention_share, covered_shares
from vgr_trl.signals import AttentionProbe, build_modality_masks
from vgr_trl.signals.ratios import special_token_ids
from vgr_trl.utils import DataError


def test_a_box_on_one_cell_covers_that_cell_in_row_order() -> None:
    # 2 rows x 3 columns on 60 x 20 pixels: cells of 20 x 10. Second row, third column is the last of six cells.
    assert covered_shares((2, 3), (60, 20), [(40, 10, 20, 10)]) == [0, 0, 0, 0, 0, 1]
    assert covered_shares((2, 3), (60, 20), [(20, 0, 20, 10)]) == [0, 1, 0, 0, 0, 0]


def test_a_box_over_edges_covers_parts_by_area() -> None:
    # Cells of 20 x 10. The box reaches from x = 15 to 25 and from y = 5 to 15: a quarter of its 100 px lies in each of
    # the four cells around (20, 10), 25 of a cell's 200 px.
    shares = covered_shares((2, 3), (60, 20), [(15, 5, 10, 10)])
    assert shares == pytest.approx([0.125, 0.125, 0, 0.125, 0.125, 0])
    assert area_share(shares) == pytest.approx(100 / 1200)


def test_what_two_boxes_share_counts_once() -> None:
    # One cell of 10 x 10: two boxes of 6 x 6 with an overlap of 2 x 2 cover 36 + 36 - 4 = 68 px; a third adds none.
    assert covered_shares((1, 1), (10, 10), [(0, 0, 6, 6), (4, 4, 6, 6), (1, 1, 2, 2)]) == pytest.approx([0.68])


def test_boxes_outside_the_image_count_only_inside() -> None:
    assert covered_shares((1, 2), (10, 10), [(-5, -5, 10, 10), (20, 0, 5, 5), (3, 3, 0, 4)]) == [0.5, 0]


def test_cells_of_a_stretched_image_are_fractions_of_a_pixel() -> None:
    # 400 x 100 px, 4 x 14 cells: a cell is 28 4/7 px wide and 25 high. A box of one cell at column 13, row 3.
    shares = covered_shares((4, 14), (400, 100), [(400 - 400 / 14, 75, 400 / 14, 25)])
    assert shares[-1] == pytest.approx(1)
    assert sum(shares[:-1]) == pytest.approx(0, abs=1e-9)


def test_attention_share_weighs_cells_by_their_attention() -> None:
    # 0.1 of 0.5 lies in a cell that is covered whole, 0.3 in one that is covered to a third: 0.1 + 0.1 of 0.5.
    assert attention_share([0.1, 0.3, 0.1], [1, 1 / 3, 0]) == pytest.approx(0.4)
    assert attention_share([2, 6, 2], [1, 1 / 3, 0]) == pytest.approx(0.4)
    assert attention_share([0, 0], [1, 0]) is None


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    boxes=st.lists(st.tuples(*[st.integers(-4, 14)] * 2, *[st.integers(0, 12)] * 2), max_size=5),
)
def test_shares_agree_with_counting_pixels(rows: int, columns: int, boxes: list[tuple[int, ...]]) -> None:
    # Cells of 3 x 2 px and boxes on whole pixels: counting pixels is exact.
    shares = covered_shares((rows, columns), (3 * columns, 2 * rows), boxes)
    for index, share in enumerate(shares):
        row, column = divmod(index, columns)
        inside = [
            any(left <= x < left + width and top <= y < top + height for left, top, width, height in boxes)
            for x in range(3 * column, 3 * column + 3)
            for y in range(2 * row, 2 * row + 2)
        ]
        assert share == pytest.approx(sum(inside) / 6)
    assert attention_share([1.0] * len(shares), shares) == pytest.approx(area_share(shares))


@pytest.mark.parametrize(
    ("grid", "size", "box", "names"),
    [
        ((0, 2), (4, 4), (0, 0, 1, 1), r"grid is \(0, 2\)"),
        ((1, 2.5), (4, 4), (0, 0, 1, 1), r"grid is \(1, 2.5\)"),
        ((1, 2), (4, 0), (0, 0, 1, 1), r"size is \(4, 0\)"),
        ((1, 2), (float("nan"), 4), (0, 0, 1, 1), "size is"),
        ((1, 2), (4, 4), (0, 0, -1, 1), r"box is \[0, 0, -1, 1\]"),
        ((1, 2), (4, 4), (0, 0, 1), r"box is \[0, 0, 1\]"),
        ((1, 2), (4, 4), (0, float("inf"), 1, 1), "box is"),
    ],
)
def test_what_is_no_grid_size_or_box_is_refused(grid: Any, size: Any, box: Any, names: str) -> None:
    with pytest.raises(DataError, match=names):
        covered_shares(grid, size, [box])


@pytest.mark.parametrize(
    ("attention", "names"),
    [([1.0], "1 tokens and the grid 2 cells"), ([1.0, -0.5], "-0.5"), ([1.0, float("nan")], "nan")],
)
def test_attention_that_does_not_fit_is_refused(attention: list[float], names: str) -> None:
    with pytest.raises(DataError, match=names):
        attention_share(attention, [1.0, 0.0])


# The grid, against the model. 150 x 90 px is stretched to 140 x 84: 3 rows of 5 cells, in two windows of the tower.

ROWS, COLUMNS, SIZE = 3, 5, (150, 90)
CELL = (30, 30)  # pixels of the original image


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    model, processor = build_tiny_vlm(["what is it?"], hidden_size=64, seed=0)
    return model.eval(), processor


def painted(processor: Any, row: int | None = None, column: int | None = None) -> Any:
    """Inputs of a grey image with one red cell, or without it."""
    image = Image.new("RGB", SIZE, (128, 128, 128))
    if row is not None and column is not None:
        image.paste((255, 0, 0), (column * CELL[0], row * CELL[1], (column + 1) * CELL[0], (row + 1) * CELL[1]))
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[[image]], return_tensors="pt")
    merge = processor.image_processor.merge_size
    assert (inputs["image_grid_thw"][0, 1:] // merge).tolist() == [ROWS, COLUMNS]
    return inputs


def embedded(model: Any, inputs: Any) -> torch.Tensor:
    """What the language model gets for each vision token, (V, hidden)."""
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return torch.cat(list(features.pooler_output))


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 4), (1, 3), (2, 0), (2, 4)])
def test_attention_on_the_token_of_a_cell_falls_into_its_pixels(tiny: tuple[Any, Any], row: int, column: int) -> None:
    model, processor = tiny
    inputs = painted(processor, row, column)
    with torch.no_grad():
        vision = embedded(model, inputs)  # (V, hidden)
        change = (vision - embedded(model, painted(processor))).norm(dim=1)
    token = int(change.argmax())  # the token that sees the red, whatever its place
    attend_only_to(model, vision, token)
    masks = build_modality_masks(
        inputs["input_ids"],
        inputs["attention_mask"],
        vision_token_ids=[model.config.image_token_id],
        special_token_ids=special_token_ids(processor),
    )
    with torch.no_grad(), AttentionProbe(model, masks, rows=[inputs["input_ids"].size(1) - 1], keep_rows=[0]) as probe:
        model(**inputs)
    attention = probe.kept[0][0, 0].tolist()  # of the first layer's only query, (V,)
    assert sum(attention) > 0.99

    box = (column * CELL[0], row * CELL[1], *CELL)
    share = attention_share(attention, covered_shares((ROWS, COLUMNS), SIZE, [box]))
    assert share is not None
    assert share > 0.99


def attend_only_to(model: Any, vision: torch.Tensor, token: int) -> None:
    """Let every query of the first layer attend to the key of one vision token.

    All queries are the same vector, whose only entry is in the pair of dimensions that the position turns least (by
    3e-4 of the distance); the keys have in it how much their token is like `token` and unlike the other vision tokens.
    """
    layer = model.model.language_model.layers[0]
    with torch.no_grad():
        vision = layer.input_layernorm(vision)
        others = torch.cat([vision[:token], vision[token + 1 :]])
        texts = layer.input_layernorm(model.get_input_embeddings().weight)  # what else the queries may look at
        rest = torch.cat([others, texts])
        target = torch.zeros(len(rest) + 1)
        target[0] = 1.0
        likeness = torch.linalg.lstsq(torch.cat([vision[token][None], rest]), target[:, None], driver="gelsd").solution
        attention = layer.self_attn
        dimension = attention.head_dim // 2 - 1
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        for head in range(attention.q_proj.out_features // attention.head_dim):
            attention.q_proj.bias[head * attention.head_dim + dimension] = 1e4
        for head in range(attention.k_proj.out_features // attention.head_dim):
            attention.k_proj.weight[head * attention.head_dim + dimension] = likeness.flatten()
