"""Pixels kept as bytes: exactly what processors make of images, in a quarter or an eighth of the memory."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vgr_trl.batch import Rows, nbytes, pack, unpack

MEAN, DEVIATION = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])


def drawn(*shape: int) -> torch.Tensor:
    """Bytes, normalised by channel, which is the last dimension."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(0, 256, (*shape, 3), generator=draw) / 255 - MEAN) / DEVIATION


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "share"),
    [
        (drawn(2, 80, 80).permute(0, 3, 1, 2), 1),  # (images, 3, height, width)
        (drawn(1, 4, 64, 64).permute(0, 1, 4, 2, 3), 1),  # (rows, images, 3, height, width)
        (drawn(40, 196).flatten(1), 1),  # (patches, pixels of 3 channels)
        (drawn(40, 196).transpose(1, 2).flatten(1), 1),  # (patches, 3 channels of pixels)
        (drawn(40, 196).transpose(1, 2).repeat_interleave(2, 1).flatten(1), 2),  # the same, two equal frames
        (torch.full((200, 301), 0.25), 1),
        (drawn(20_000)[:, 0], 1),
    ],
    ids=["images", "images of rows", "channels last", "channels first", "frames", "one level", "one channel"],
)
def test_a_byte_per_element_restores_each_exactly(value, share, dtype):
    value = value.to(dtype)
    packed = pack(value)
    assert packed["index"].dtype == torch.uint8
    assert packed["index"].numel() * share == value.numel()
    again = unpack(packed, "cpu")
    assert again.dtype == dtype
    assert torch.equal(again, value)


@pytest.mark.parametrize("picture", ["noise", "two colours", "grey levels"])
def test_an_image_of_a_megapixel_takes_three_bytes_per_pixel(picture):
    if picture == "noise":
        pixels = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    elif picture == "two colours":
        pixels = np.full((1000, 1000, 3), (12, 200, 7), dtype=np.uint8)
        pixels[100:300, 400:900] = (255, 0, 9)
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
