"""Rows of a batch: joined by hand, and stored with their pixels as bytes, from which they are restored exactly."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vgr_trl.batch import Rows, join_rows, nbytes, pack, unpack
from vgr_trl.sampling import Group, ReplayBuffer

MEAN, DEVIATION = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])


def drawn(*shape: int) -> torch.Tensor:
    """Bytes, normalised by channel, which is the last dimension."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(0, 256, (*shape, 3), generator=draw) / 255 - MEAN) / DEVIATION


@pytest.mark.parametrize(
    ("value", "share"),
    [
        (drawn(2, 80, 80).permute(0, 3, 1, 2), 1),  # (images, 3, height, width)
        (drawn(1, 4, 64, 64).permute(0, 1, 4, 2, 3), 1),  # (rows, images, 3, height, width)
        (drawn(40, 196).flatten(1), 1),  # (patches, pixels of 3 channels)
        (drawn(40, 196).transpose(1, 2).flatten(1), 1),  # (patches, 3 channels of pixels)
        (drawn(40, 196).transpose(1, 2).repeat_interleave(2, 1).flatten(1), 2),  # the same, two equal frames
        (torch.full((200, 301), 0.25), 1),
        (drawn(20_000)[:, 0].bfloat16(), 1),
    ],
    ids=["images", "images of rows", "channels last", "channels first", "frames", "one level", "one channel"],
)
def test_a_byte_per_element_restores_each_exactly(value, share):
    dtype = value.dtype
    packed = pack(value)
    assert packed["index"].dtype == torch.uint8
    assert packed["index"].numel() * share == value.numel()
    again = unpack(packed, "cpu")
    assert again.dtype == dtype
    assert torch.equal(again, value)


@pytest.mark.parametrize("picture", ["noise", "grey levels"])
def test_an_image_of_a_megapixel_takes_three_bytes_per_pixel(picture):
    if picture == "noise":
        pixels = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    else:
        pixels = np.repeat(np.repeat(np.arange(1000, dtype=np.uint8)[:, None, None], 1000, 1), 3, 2)
    processor = Qwen2VLImageProcessorPil(max_pixels=10**7)
    value = processor(images=[Image.fromarray(pixels)], return_tensors="pt")["pixel_values"]
    packed = pack(value)
    assert nbytes(value) > 24e6
    assert nbytes(packed) < 3.1e6
    assert torch.equal(unpack(packed, "cpu"), value)


@pytest.mark.parametrize(
    "value",
    [torch.randn(200, 300, generator=torch.Generator().manual_seed(0)), drawn(10, 10), torch.arange(20_000)],
    ids=["too many levels", "small", "integers"],
)
def test_what_is_not_made_of_bytes_stays(value):
    assert pack(value) is value
    assert unpack(value, "cpu") is value


def test_rows_keep_bytes_and_completions_of_a_prompt_share_them():
    pixels = drawn(40, 196).flatten(1)
    rows = Rows(1, 1, {}, [{"pixel_values": pixels}, {"pixel_values": pixels.clone()}, {}])
    stored = rows.stored()
    first, second, without = stored.images
    assert first["pixel_values"] is second["pixel_values"]
    assert without == {}
    assert stored.nbytes == nbytes(first["pixel_values"]) < rows.nbytes / 7


PAD = 9


def rows(prompt, completion, count=1, **columns):
    """Tokens counted up from 1, all of them valid."""
    wide = {
        "prompt_ids": torch.arange(1, prompt + 1).expand(count, -1),
        "prompt_mask": torch.ones(count, prompt, dtype=torch.long),
        "completion_ids": torch.arange(1, completion + 1).expand(count, -1),
        "completion_mask": torch.ones(count, completion, dtype=torch.long),
    }
    return Rows(prompt, completion, {**wide, **columns}, [{} for _ in range(count)])


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    joined = join_rows([rows(2, 3), rows(3, 1)], pad_token_id=PAD).columns
    assert joined["prompt_ids"].tolist() == [[PAD, 1, 2], [1, 2, 3]]
    assert joined["prompt_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert joined["completion_ids"].tolist() == [[1, 2, 3], [1, PAD, PAD]]
    assert joined["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_lengths_are_multiples():
    joined = join_rows([rows(2, 3), rows(4, 1)], pad_token_id=PAD, pad_to_multiple_of=4)
    assert (joined.prompt_length, joined.completion_length) == (4, 4)
    assert joined.columns["prompt_ids"].tolist() == [[PAD, PAD, 1, 2], [1, 2, 3, 4]]


def test_columns_that_only_one_has():
    """No tool: every token is the policy's. No old log-probabilities: NaN, taken from the first pass. No type: 0."""
    one = rows(
        2,
        2,
        tool_mask=torch.tensor([[1, 0]]),
        old_per_token_logps=torch.tensor([[-0.5, -0.25]]),
        token_type_ids=torch.tensor([[0, 1, 0, 0]]),
        importance_sampling_ratio=torch.tensor([[0.5]]),
    )
    other = rows(1, 3, importance_sampling_ratio=torch.tensor([[2.0, 3.0, 4.0]]))
    joined = join_rows([one, other], pad_token_id=PAD).columns
    assert joined["tool_mask"].tolist() == [[1, 0, 1], [1, 1, 1]]
    assert joined["token_type_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert joined["importance_sampling_ratio"].tolist() == [[0.5, 0.5, 1.0], [2.0, 3.0, 4.0]]
    logps = joined["old_per_token_logps"]
    assert logps[0].tolist() == [-0.5, -0.25, 0.0]
    assert logps[1].isnan().all()


def test_megabytes():
    """Two rows of 2 + 3 tokens, ids and masks: 2 x 5 x 2 numbers of 8 bytes."""
    stored = rows(2, 3, count=2)
    values = torch.tensor([0.0, 1.0])
    buffer = ReplayBuffer(2)
    assert buffer.megabytes == 0
    assert buffer.add(Group(advantages=values - 0.5, rewards=values, rows=stored))
    assert buffer.megabytes == 160 / 1e6


def test_what_is_dead_if_nothing_else_is_said():
    """Rewards 0 and d have the deviation d / sqrt(2): 0.7e-6 and 1.4e-6."""
    for difference, admitted in ((1e-6, False), (2e-6, True)):
        values = torch.tensor([0.0, difference])
        assert ReplayBuffer(1).add(Group(advantages=values - values.mean(), rewards=values)) is admitted
