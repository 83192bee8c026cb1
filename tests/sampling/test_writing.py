"""Groups cut out of one batch and written into another: every row keeps what TRL reads for it.

What a row has is read with TRL's own functions, from the whole batch.
"""

from typing import Any

import pytest
import torch
from batches import FAMILIES, PAD, cut, draw_batch, draw_signals, write
from trl.trainer.utils import split_pixel_values_by_grid

from vgr_trl.errors import DataError
from vgr_trl.trl_bridge import to_trl

TOKENS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
IMAGES = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes")


def rows_as_read(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """What each row has, without the padding of its batch; the padding has to be what TRL pads with."""
    one_per_row = "pixel_attention_mask" in batch and "spatial_shapes" not in batch  # Idefics: TRL leaves it as it is,
    split = batch if one_per_row else split_pixel_values_by_grid(batch)  # unless there are as many images as rows
    found = []
    for row in range(len(batch["prompt_ids"])):
        prompt, completion = batch["prompt_mask"][row] == 1, batch["completion_mask"][row] == 1
        assert (batch["prompt_ids"][row][~prompt] == PAD).all()
        assert (batch["completion_ids"][row][~completion] == PAD).all()
        assert prompt.tolist() == sorted(prompt.tolist()), "prompts are padded on the left"
        assert completion.tolist() == sorted(completion.tolist(), reverse=True), "completions on the right"
        values = {
            "prompt": batch["prompt_ids"][row][prompt], "completion": batch["completion_ids"][row][completion],
            "advantage": batch["advantages"][row],
            "num_images": batch["num_images"][row] if "num_images" in batch else 0,
        }  # fmt: skip
        for name in batch.keys() & {*TOKENS, "tool_mask"}:
            values[name] = batch[name][row][completion]
        if "tool_mask" in batch:
            assert (batch["tool_mask"][row][~completion] == 1).all()
        if "mm_token_type_ids" in batch:
            of_prompt, of_completion = batch["mm_token_type_ids"][row].split([len(prompt), len(completion)])
            assert not of_prompt[~prompt].any()
            assert not of_completion.any()
            values["mm_token_type_ids"] = of_prompt[prompt]
        for name in IMAGES:
            if split.get(name) is not None:
                values[name] = without_padding(split[name][row])
        found.append(values)
    return found


def without_padding(part: torch.Tensor) -> torch.Tensor:
    """The smallest block at the origin that has all values other than padding."""
    positions = (part != 0).nonzero()
    return part[tuple(slice(int(last) + 1) for last in positions.amax(0))] if len(positions) else part[:0].flatten()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize(
    ("images", "lengths"), [([1, 1, 1], (5, 4)), ([1, 0, 2], (9, 7)), ([0, 2, 0], (3, 2))], ids=str
)  # prompts and completions of 5 and 4 tokens make way for equal, longer and shorter ones
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_keeps_what_it_has(family, images, lengths):
    batch = draw_batch(1, [1, 2, 0, 1], family=family)
    other = draw_batch(2, images, family=family, prompts=lengths[0], completions=lengths[1])
    stored = cut(other, [0, 1, 2])
    written = to_trl(write(batch, {3: stored[1], 0: stored[2]}).batch)
    before, there, after = rows_as_read(batch), rows_as_read(other), rows_as_read(written)
    for row, expected in enumerate([*there[4:6], *before[2:6], *there[2:4]]):
        assert_same(after[row], expected)
    assert written["pixel_values"].dtype == torch.bfloat16
    assert written.keys() == batch.keys()


def test_text_group_into_a_batch_of_images_and_the_other_way_round():
    text = draw_batch(1, [None, None], prompts=7, completions=3)
    images = draw_batch(2, [1, 2], family="qwen")
    assert "num_images" not in text
    written = to_trl(write(images, {0: cut(text, [1])[0]}).batch)
    assert written["num_images"] == [0, 0, 2, 2]
    after, expected = rows_as_read(written), rows_as_read(text)
    torch.testing.assert_close(after[0]["prompt"], expected[2]["prompt"])
    assert after[0]["mm_token_type_ids"].tolist() == [0] * 7
    assert_same(after[2], rows_as_read(images)[2])

    written = to_trl(write(text, {0: cut(images, [1])[0]}).batch)
    assert written["num_images"] == [2, 2, 0, 0]
    assert_same(rows_as_read(written)[1], rows_as_read(images)[3])
    assert rows_as_read(written)[3]["mm_token_type_ids"].tolist() == [0] * 7


def test_vllm_reference_and_tools_travel_too():
    batches = []
    for seed, size in ((1, 4), (2, 7)):
        batch = draw_batch(seed, [1, 1], family="qwen", completions=size)
        mask = batch["completion_mask"]
        batch |= {name: torch.rand(mask.shape) * mask for name in TOKENS[1:3]}
        batch["importance_sampling_ratio"] = torch.rand(mask.shape).where(mask == 1, 1.0)
        batch["tool_mask"] = torch.randint(0, 2, mask.shape).where(mask == 1, 1)
        batches.append(batch)
    written = to_trl(write(batches[0], {1: cut(batches[1], [1])[0]}).batch)
    assert_same(rows_as_read(written)[2], rows_as_read(batches[1])[2])
    assert_same(rows_as_read(written)[0], rows_as_read(batches[0])[0])
    outside = written["importance_sampling_ratio"][written["completion_mask"] == 0]
    assert (outside == 1).all()
    tokens = int((written["completion_mask"] * written["tool_mask"]).sum())
    assert written["num_items_in_batch"] == 2 * tokens + 100, "of all processes, as TRL counts"


def test_signals_travel_with_their_rows():
    batch, other = draw_batch(1, [1, 1], family="qwen"), draw_batch(2, [1, 1], family="qwen", completions=7)
    signals, others = draw_signals(3, batch), draw_signals(4, other)
    (stored,) = cut(other, [1], signals=others)
    written = write(batch, {0: stored}, signals=signals).signals
    for row, (source, of) in enumerate([(2, others), (3, others), (2, signals), (3, signals)]):
        length = int(of.mask[source].sum())
        for name in ("logps", "entropies", "dependency"):
            assert torch.equal(getattr(written, name)[row, :length], getattr(of, name)[source, :length])
        for side in ("vision", "instruction"):
            found, expected = getattr(written.attention, side), getattr(of.attention, side)
            assert torch.equal(found[:, row, :length], expected[:, source, :length])
            count = f"num_{side}"
            assert getattr(written.attention, count)[row] == getattr(of.attention, count)[source]
        assert written.mask[row].sum() == written.attention.mask[row].sum() == length
    assert written.mask.dtype == torch.bool
    assert written.attention.vision.shape[:2] == (3, 4)
    assert write(batch, {0: stored}).signals is None
    on_policy = {name: value for name, value in other.items() if name != TOKENS[0]}
    (measured,) = cut(on_policy, [1], signals=others)
    assert torch.equal(measured.rows.old_logps, others.logps[2:, : measured.rows.length])


def test_what_cannot_be_cut_into_rows():
    batch = draw_batch(1, [1, 1]) | {"strange": torch.rand(3, 2)}
    with pytest.raises(DataError):
        cut(batch, [0])
