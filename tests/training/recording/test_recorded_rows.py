"""Rows of a batch as completions of a record: which ones, their grids, their maps, and the batch in numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vgr_trl.reporting.recorder import (
    Completing,
    OwnDecoder,
    add_credit,
    grids_of_row,
    images_of_row,
    quantised,
    question_id,
    rows_to_record,
    summary_of,
    take_rows,
    without_padding,
)
from vgr_trl.rollout import Rollout


@pytest.mark.parametrize(
    ("samples", "generations", "total", "expected"),
    [
        (4, 4, 12, [0, 1, 4, 5]),  # two of the first prompt, two of the second
        (3, 4, 12, [0, 1, 4]),
        (6, 4, 8, [0, 1, 2, 3, 4, 5]),  # two of both, then two more of the first
        (4, 1, 6, [0, 1, 2, 3]),
        (5, 3, 3, [0, 1, 2]),
        (1, 8, 16, [0]),
    ],
)
def test_two_completions_of_each_prompt_are_recorded_first(samples, generations, total, expected):
    assert rows_to_record(samples, generations, total) == expected


def test_grids_are_those_of_the_processor_merged():
    # Row 0 has two images, row 1 one: 4 x 6 patches are 2 x 3 vision tokens where two by two are merged.
    batch = {"num_images": [2, 1], "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2], [1, 8, 4]])}
    assert grids_of_row(batch, 0, 2, 7) == [(2, 3), (1, 1)]
    assert grids_of_row(batch, 1, 2, 8) == [(4, 2)]
    assert grids_of_row(batch, 1, None, 8) == [None]


def test_frames_of_a_video_have_no_grid_of_one_image():
    assert grids_of_row({"num_images": [1], "image_grid_thw": torch.tensor([[2, 4, 4]])}, 0, 2, 8) == [None]


@pytest.mark.parametrize(
    ("num_vision", "extra", "expected"),
    [
        (512, {}, [(16, 16), (16, 16)]),  # two images of 256 tokens
        (500, {}, [None, None]),  # 250 is no square
        (511, {}, [None, None]),
        (None, {}, [None, None]),
        (512, {"num_tiles": [2]}, [None, None]),
        (512, {"image_sizes": torch.tensor([[1, 1]])}, [None, None]),
    ],
)
def test_square_grids_of_equal_images_are_known(num_vision, extra, expected):
    assert grids_of_row({"num_images": [2], **extra}, 0, None, num_vision) == expected


def test_rows_without_images_have_no_grids():
    assert grids_of_row({}, 0, 2, 0) == []
    assert grids_of_row({"num_images": [1, 0]}, 1, 2, 0) == []


def test_attention_is_kept_to_a_510th_of_the_largest():
    # 0.5 is the largest of the first token: 0.25 is 127.5 of 255, which rounds to the even 128.
    found = quantised(torch.tensor([[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]), [(1, 3)])
    assert found.scale == [0.5, 0.0]
    assert list(found.values) == [255, 128, 0, 0, 0, 0]
    attention = torch.rand(20, 12, generator=torch.Generator().manual_seed(0))
    kept = quantised(attention, [(2, 3), (3, 2)])
    for token, row in enumerate(attention.tolist()):
        assert kept.row(token) == pytest.approx(row, abs=max(row) / 510 + 1e-6)


@pytest.mark.parametrize("grids", [[None], [(2, 2)], [], [(1, 3), None]])
def test_attention_without_a_grid_for_it_is_left_out(grids):
    assert quantised(torch.rand(4, 3), grids) is None


def test_images_have_sizes_and_thumbnails_and_what_is_none_has_not():
    image = Image.new("RGB", (512, 128), "red")
    recorded, thumbnails, digest = images_of_row({"images": [image, "no such file"]}, [(2, 8), None])
    assert [(item.width, item.height, item.grid) for item in recorded] == [(512, 128, (2, 8)), (0, 0, None)]
    assert thumbnails[0].size == (256, 64)
    assert thumbnails[1] is None
    same, other = (images_of_row({"image": picture}, [])[2] for picture in (image, Image.new("RGB", (512, 128))))
    assert question_id("what?", digest) == question_id("what?", same)
    assert question_id("what?", digest) != question_id("what?", other)
    assert question_id("what?", digest) != question_id("who?", digest)
    assert images_of_row({"prompt": "text"}, [])[:2] == ([], [])


def test_regions_are_pixels_or_shares_of_the_image():
    image = Image.new("RGB", (200, 100))
    for given, expected in (
        ([[0.5, 0, 0.5, 1]], [(100, 0, 100, 100)]),
        ([[50, 10, 20, 30]], [(50, 10, 20, 30)]),
        ([], None),
        ("somewhere", None),
    ):
        (recorded,), _, _ = images_of_row({"image": image, "regions": given}, [None])
        assert recorded.regions == expected


def test_a_truncated_completion_whose_mask_is_empty_ends_before_the_padding():
    assert without_padding([1, 2, 9, 9], [0, 0, 0, 0], 9) == [1, 2]
    assert without_padding([1, 2, 9, 9], [1, 1, 1, 0], 9) == [1, 2, 9]
    assert without_padding([9, 9], [0, 0], 9) == []


def test_taken_rows_become_completions_that_hold_nothing_of_the_batch():
    """Row 3 is the second of the second prompt; weights 1 and 2 of rewards 0.5 and NaN make 0.5."""
    batch = {
        "prompt_ids": torch.tensor([[9, 9], [9, 9], [9, 5], [6, 5]]),
        "prompt_mask": torch.tensor([[0, 1], [0, 1], [0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[1, 9], [1, 9], [1, 9], [1, 2]]),
        "completion_mask": torch.tensor([[1, 0], [1, 0], [1, 0], [1, 1]]),
        "advantages": torch.tensor([0.0, 0.0, 1.0, -1.0]),
    }
    rewards = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.5, math.nan]])
    rollout = Rollout([{"solution": 7}] * 4, recorded=(0, 3), batch=batch, rewards=rewards, replaced=[0])
    taken = take_rows(rollout, 0, 2, 9, None)
    before, after = torch.tensor([0.0, 0.0, 1.0, -2.0]), torch.tensor([[0.0, 0], [0, 0], [1, 1], [-2, -1]])
    add_credit(taken, rollout, before, after)
    for values in (batch["completion_ids"], rewards, before, after):
        values.zero_()

    def decode(tokens, skip_special_tokens, **kwargs):
        return "".join("abcdefghij"[token] for token in tokens)

    options = SimpleNamespace(token_weights_positive_only=False)
    first, last = Completing(decode, [6], options, ["accuracy", "other"], [1.0, 2.0]).rows(taken)
    assert (first.completion.replaced, first.completion.advantages, first.completion.group) == (True, None, 0)
    found = last.completion
    assert (last.place, found.group, found.prompt, found.text, found.tokens) == (3, 1, "<image>f", "bc", ["b", "c"])
    assert (found.solution, found.advantage, found.advantages, found.replaced) == ("7", -2.0, [-2.0, -1.0], False)
    assert (found.reward, found.correct) == (0.5, False)
    assert math.isnan(found.rewards["other"])


def test_a_tokenizer_is_copied_before_another_thread_decodes_with_it():
    class Tokenizer:
        used = 0

        def decode(self, tokens, **options):
            self.used += 1
            return f"{tokens}{options}"

    tokenizer = Tokenizer()
    decode = OwnDecoder(tokenizer)
    assert decode([1, 2], clean=True) == "[1, 2]{'clean': True}"
    assert decode([3]) == "[3]{}"
    assert (tokenizer.used, decode._own.used) == (0, 2)


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
