"""Rows of a batch as completions of a record: which ones, their tokens, images and maps, the batch in numbers."""

import io
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.made_records import completion
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.reporting.recorder import (
    RecordedRow,
    RolloutRecorder,
    grids_of_row,
    images_of_row,
    prompt_text,
    quantised,
    question_id,
    rows_to_record,
    summary_of,
    thumbnail,
    token_pieces,
    without_padding,
)
from vgr_trl.rollout import Rollout

TOKENIZER = build_processor(["what colour is the circle?", "red blue", "a red"]).tokenizer


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("samples", "generations", "total", "expected"),
    [
        (4, 4, 12, [0, 1, 4, 5]),  # two of the first prompt, two of the second
        (6, 4, 8, [0, 1, 2, 3, 4, 5]),  # two of both, then two more of the first
    ],
)
def test_two_completions_of_each_prompt_are_recorded_first(samples, generations, total, expected):
    assert rows_to_record(samples, generations, total) == expected


def test_grids_are_those_of_the_processor_merged():
    # Row 0 has two images, row 1 one: 4 x 6 patches are 2 x 3 vision tokens where two by two are merged.
    batch = {"num_images": [2, 1], "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2], [1, 8, 4]])}
    assert grids_of_row(batch, 0, 2, 7) == [(2, 3), (1, 1)]
    assert grids_of_row(batch, 1, 2, 8) == [(4, 2)]


@pytest.mark.parametrize(
    ("num_vision", "extra", "expected"),
    [(512, {}, (16, 16)), (500, {}, None), (None, {}, None), (512, {"num_tiles": [2]}, None)],  # 250 is no square
)
def test_square_grids_of_equal_images_are_known(num_vision, extra, expected):
    assert grids_of_row({"num_images": [2], **extra}, 0, None, num_vision) == [expected] * 2


def test_attention_is_kept_to_a_510th_of_the_largest():
    # 0.5 is the largest of the first token: 0.25 is 127.5 of 255, which rounds to the even 128.
    found = quantised(torch.tensor([[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]), [(1, 3)])
    assert found.scale == [0.5, 0.0]
    assert list(found.values) == [255, 128, 0, 0, 0, 0]
    attention = torch.rand(20, 12, generator=torch.Generator().manual_seed(0))
    kept = quantised(attention, [(2, 3), (3, 2)])
    for token, row in enumerate(attention.tolist()):
        assert kept.row(token) == pytest.approx(row, abs=max(row) / 510 + 1e-6)
    for grids in ([None], [(2, 2)], [], [(3, 4), None]):
        assert quantised(attention, grids) is None


def test_images_have_sizes_and_thumbnails_and_what_is_none_has_not():
    image = Image.new("RGB", (512, 128), "red")
    recorded, thumbnails, digest = images_of_row({"images": [image, "no such file"]}, [(2, 8), None])
    assert [(item.width, item.height, item.grid) for item in recorded] == [(512, 128, (2, 8)), (0, 0, None)]
    assert [item.file for item in recorded] == [*thumbnails, None]
    same, other = (images_of_row({"image": picture}, [])[2] for picture in (image, Image.new("RGB", (512, 128))))
    assert question_id("what?", digest) == question_id("what?", same)
    assert len({question_id(*pair) for pair in (("what?", digest), ("what?", other), ("who?", digest))}) == 3
    assert images_of_row({"prompt": "text"}, [])[:2] == ([], {})


def opened(image):
    return Image.open(io.BytesIO(thumbnail(image)[1]))


@pytest.mark.parametrize(
    ("size", "mode", "expected"),
    [
        ((512, 256), "L", (256, 128)),
        ((30, 20), "P", (30, 20)),
        ((60_000, 3), "1", (256, 1)),
        ((9, 300), "CMYK", (8, 256)),
    ],
)
def test_a_thumbnail_has_at_most_256_pixels_along_a_side_and_is_named_by_its_content(size, mode, expected):
    image = Image.new("RGB", size, (200, 30, 90)).convert(mode)
    assert (opened(image).format, opened(image).size, image.size, image.mode) == ("WEBP", expected, size, mode)
    assert thumbnail(image) == thumbnail(image.copy())
    assert thumbnail(image)[0] != thumbnail(Image.new("RGB", size, "white"))[0]


def test_what_is_transparent_shows_white():
    assert opened(Image.new("RGBA", (4, 4), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_a_truncated_completion_whose_mask_is_empty_ends_before_the_padding():
    assert without_padding([1, 2, 9, 9], [0, 0, 0, 0], 9) == [1, 2]
    assert without_padding([1, 2, 9, 9], [1, 1, 1, 0], 9) == [1, 2, 9]


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_pieces_of_any_tokens_are_the_text_also_where_bytes_are_none(ids):
    pieces = token_pieces(ids, decode)
    assert (len(pieces), "".join(pieces)) == (len(ids), decode(ids))
    of_bytes = TOKENIZER("é").input_ids  # two bytes, which no token joins
    assert token_pieces([*of_bytes, *TOKENIZER(" red").input_ids], decode) == ["", "é", " red"]


def test_spaces_at_the_start_of_tokens_survive_a_tokenizer_that_drops_the_first():
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    assert token_pieces([0, 1, 2], backend.decode) == ["a", " b", "c"]


def test_the_tokens_of_an_image_are_one_word_in_a_prompt():
    image = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
    red, blue = TOKENIZER("red").input_ids, TOKENIZER(" blue").input_ids
    assert prompt_text([image] * 4 + red + [image] + blue, [image], decode) == "<image>red<image> blue"


def test_recorded_rows_get_what_the_loss_reads():
    """Of two rows the first one's group was replaced; the other one's weights do not count as it lost."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            output_dir="", rollout_log_steps=0, rollout_log_path=None, eval_log_path=None, markdown_logs=False,
            attention_diag_log_path=None, token_weights_log_path=None, token_weights_positive_only=True,
        ),
        measurement=SimpleNamespace(needed=set()),
    )  # fmt: skip
    recorded = [RecordedRow(row, completion(group=row // 2, weights=[0.5, 1.5]), {}) for row in (0, 3)]
    first, found = (row.completion for row in recorded)
    rollout, recorder = Rollout([], recorded=(0, 3), replaced=[0]), RolloutRecorder(trainer)
    before, after = torch.tensor([0.0, 0.0, 1.0, -2.0]), torch.tensor([[0.0, 0], [0, 0], [1, 1], [-2, -1]])
    recorder.add_credit(recorded, rollout, before, after)
    assert (first.replaced, first.advantages, found.replaced) == (True, None, False)
    assert (found.advantage, found.advantages, found.weights) == (-2.0, [-2.0, -1.0], [1.0, 1.0])
    # A critic's advantages are those of tokens: their mean is recorded as the completion's.
    recorder.add_credit(recorded, rollout, torch.tensor([[0.0, 0]] * 3 + [[1, 3.0]]), torch.tensor([0.0, 0, 0, 5]))
    assert (found.advantage, found.advantages) == (2.0, [5.0, 5.0])


def test_a_batch_in_numbers():
    # Accuracy 1, 0, 1 and one row that it does not apply to; totals 1·a + 2·b are 1, 1, 3 and 2.
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 1.0], [math.nan, 1.0]])
    metrics = {"attention/late/vgr": 2.0, "attention/prompt/late/vgr": 9.0, "token_weight_mean": 1.0, "kl": 3.0,
               "combined_token_fraction": 0.5}  # fmt: skip
    summary = summary_of(rewards, ["accuracy_reward", "other"], torch.tensor([1.0, 2.0]), metrics)
    assert summary.completions == 4
    assert summary.success_rate == pytest.approx(2 / 3)
    assert summary.rewards["accuracy_reward"] == pytest.approx((2 / 3, math.sqrt(1 / 3)))
    assert summary.rewards["other"] == pytest.approx((0.625, math.sqrt((0.625**2 + 0.125**2 + 2 * 0.375**2) / 3)))
    assert summary.rewards["total"] == pytest.approx((1.75, math.sqrt((2 * 0.75**2 + 1.25**2 + 0.25**2) / 3)))
    assert summary.segments == {"late": {"vgr": 2.0}}
    assert summary.credit == {"token_weight_mean": 1.0, "combined_token_fraction": 0.5}
    nothing = summary_of(torch.full((1, 1), math.nan), ["accuracy_reward"], torch.tensor([1.0]), {})
    assert (nothing.success_rate, nothing.rewards["accuracy_reward"]) == (None, (None, None))
    assert summary_of(rewards[:, 1:], ["other"], torch.tensor([1.0]), {}).success_rate is None
