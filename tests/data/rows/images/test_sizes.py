import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgr_trl.data.images import ImageLimits
from vgr_trl.utils import ConfigError


@pytest.mark.parametrize(
    ("limits", "size", "expected"),
    [
        ({}, (640, 480), (640, 480)),
        ({}, (4096, 2048), (2048, 1024)),  # the short side, 2048, is halved
        ({}, (1000, 5000), (1000, 5000)),  # a long side alone is no reason
        ({"max_short_side": None}, (4096, 2048), (4096, 2048)),
        ({"max_pixels": 640 * 480 // 4}, (640, 480), (320, 240)),
        ({"max_pixels": 100 * 50}, (4000, 2000), (100, 50)),  # 1/40, which is less than the short side's 1024/2000
        ({"min_pixels": 640 * 480}, (320, 240), (640, 480)),
        ({"min_pixels": 100}, (640, 480), (640, 480)),
        ({"max_short_side": 10}, (11, 1000), (10, 909)),  # 909.09, rounded down
    ],
)
def test_sizes_by_hand(limits, size, expected):
    assert ImageLimits(**limits).size_of(*size) == expected
    assert ImageLimits(**limits).size_of(*size[::-1]) == expected[::-1]


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    most=st.integers(1, 10**6) | st.none(),
    short=st.integers(1, 2000) | st.none(),
    share=st.floats(0.01, 1) | st.none(),
)
def test_no_limit_is_exceeded_and_the_ratio_is_kept(width, height, most, short, share):
    bounds = [bound for bound in (most, short and short**2) if bound]
    least = None if share is None else max(1, int(share * min(bounds, default=10**5)))
    limits = ImageLimits(min_pixels=least, max_pixels=most, max_short_side=short)
    new_width, new_height = limits.size_of(width, height)
    assert min(new_width, new_height) >= 1
    thin = min(new_width, new_height) == 1  # a side of less than one pixel cannot be kept in proportion
    if most is not None and not thin:
        assert new_width * new_height <= most
    if short is not None:
        assert min(new_width, new_height) <= max(short, 1)
    if not thin:  # the exact size is within a pixel on both sides
        scale = math.sqrt(new_width * new_height / (width * height))
        assert abs(width * scale - new_width) <= 1 + new_width / new_height
        assert abs(height * scale - new_height) <= 1 + new_height / new_width
    if least is not None and new_width * new_height < least and not thin:
        slack = new_width + new_height + 1  # of one pixel per side: both bounds cannot be met at once
        assert most is not None
        assert new_width * new_height + slack >= least


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_pixels": 0}, "max_pixels is 0: give an integer of at least 1"),
        ({"min_pixels": 101, "max_pixels": 100}, "min_pixels is 101, but max_pixels and max_short_side allow 100"),
        ({"min_pixels": 101, "max_short_side": 10}, "min_pixels is 101, but max_pixels and max_short_side allow 100"),
    ],
)
def test_limits_that_contradict_are_refused(limits, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        ImageLimits(**limits)
