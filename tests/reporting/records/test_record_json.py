"""Records as lines of JSON: what is written is read again, and nothing else is taken for a record."""

import base64
import json
import math
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_records import completion, record

from vgr_trl.reporting.records import (
    AttentionMap,
    Completion,
    LogEntry,
    Record,
    RecordedImage,
    decode_log,
    decode_record,
    encode_log,
    encode_record,
)
from vgr_trl.utils import DataError

# Numbers of six digits come back as they were; longer ones are rounded.
SHORT = st.integers(-99999, 99999).map(lambda whole: whole / 8 if abs(whole) < 1000 else float(whole))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.lists(st.none() | st.integers(-999, 999).map(float), min_size=2, max_size=2)


@given(
    step=st.integers(0, 10**9), mode=st.sampled_from(["train", "eval"]), text=TEXT, tokens=st.tuples(TEXT, TEXT),
    weights=st.none() | NUMBERS, rewards=st.dictionaries(TEXT, st.none() | st.integers(-9, 9).map(float), max_size=3),
    correct=st.sampled_from([True, False, None]), values=st.binary(min_size=6, max_size=6), replaced=st.booleans(),
)  # fmt: skip
def test_a_record_comes_back_as_it_was(step, mode, text, tokens, weights, rewards, correct, values, replaced):
    written = record(
        step,
        mode,
        completion(
            text=text, tokens=list(tokens), weights=weights, rewards=rewards, correct=correct, replaced=replaced,
            metrics={"late": {"vgr": None, "aei_vision": 0.5}}, attention=AttentionMap([0.5, 0.25], values),
            images=[RecordedImage("images/a.webp", 64, 48, (2, 3)), RecordedImage(None, 0, 0)],
        ),
    )  # fmt: skip
    line = encode_record(written)
    assert "\n" not in line
    assert decode_record(line) == written


def test_what_is_not_finite_is_null():
    # Nobody can ask JSON for infinity, so an infinite VGR is not told from an undefined one.
    written = record(0, "train", completion(vgr=[math.inf, math.nan], reward=-math.inf))
    loaded = json.loads(encode_record(written), parse_constant=pytest.fail)
    assert loaded["completions"][0]["vgr"] == [None, None]
    assert loaded["completions"][0]["reward"] is None


def test_numbers_keep_six_digits_and_times_a_tenth_of_a_second():
    written = Record(3, "eval", 1795254812.345, [completion(reward=0.12345678, logps=[-0.0, -1234567.89])])
    found = decode_record(encode_record(written))
    assert found.time == 1795254812.3
    assert found.completions[0].reward == 0.123457
    assert found.completions[0].logps == [0.0, -1234567.9]
    assert math.copysign(1, found.completions[0].logps[0]) == 1


def test_a_lone_surrogate_is_replaced():
    assert decode_record(encode_record(record(0, "train", completion(text="a\ud800b")))).completions[0].text == "a?b"


def test_unknown_keys_are_passed_over_and_optional_ones_may_be_missing():
    line = (
        '{"version":1,"step":7,"mode":"eval","later":1,"completions":[{"question":"q","group":2,"prompt":"p",'
        '"text":"t","tokens":["a"],"weather":"fine","images":[{"width":3,"height":4,"depth":5}]}]}'
    )
    found = decode_record(line).completions[0]
    assert (found.group, found.weights, found.rewards, found.correct) == (2, None, {}, None)
    assert found.images == [RecordedImage(None, 3, 4, None)]


def test_attention_of_a_token_is_its_scale_times_the_share_of_255():
    # 2 tokens over 3 vision tokens; token 1 has the largest attention 0.5, and 51 / 255 = a fifth of it.
    attention = AttentionMap([0.1, 0.5], bytes([255, 0, 0, 51, 255, 102]))
    assert attention.row(1) == pytest.approx([0.1, 0.5, 0.2])
    assert attention.row(0) == pytest.approx([0.1, 0, 0])


def line_with(**changed):
    item = {"question": "q", "group": 0, "prompt": "p", "text": "t", "tokens": ["a", "b"], **changed}
    return json.dumps({"version": 1, "step": 0, "mode": "train", "completions": [item]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is no JSON"),
        ('{"version":1,"step":0,"mode":"tra', "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is a list of JSON and no object"),
        ('{"version":1,"step":0,"mode":"test","completions":[]}', "has the mode 'test', neither train nor eval"),
        ('{"version":1,"mode":"train","completions":[]}', "is damaged (KeyError: 'step')"),
        ('{"version":1,"step":0,"mode":"train","completions":[3]}', "is damaged"),
        ('{"version":1,"step":0,"mode":"train","completions":[{}]}', "is damaged"),
        (line_with(weights=[1]), "1 weights for 2 tokens"),
        (line_with(vgr=["x", 1]), "is damaged"),
        (line_with(attention={"scale": [1, 1], "values": "?"}), "is damaged"),
        (line_with(attention={"scale": [1, 1], "values": base64.b64encode(b"abc").decode()}), "in 3 bytes for 2"),
        (line_with(attention={"scale": [1, float("inf")], "values": base64.b64encode(b"ab").decode()}), "[1.0, inf]"),
        (line_with(images=[{"width": 1}]), "is damaged"),
        (line_with(images=[{"file": "images/../../secret", "width": 1, "height": 1}]), "outside of the folder images"),
        (line_with(images=[{"file": "/etc/passwd", "width": 1, "height": 1}]), "outside of the folder images"),
        (line_with(metrics={"late": 1}), "is damaged"),
        (line_with(group="x"), "is damaged"),
        (line_with(group=float("inf")), "is damaged (OverflowError"),
        (line_with(reward=10**400), "is damaged (OverflowError"),
        (line_with(images=[{"width": 1, "height": 1, "grid": [1]}]), "is damaged (IndexError"),
        (line_with(images=[{"width": 1, "height": 1, "grid": [0, 4]}]), "an image of 1x1 pixels and (0, 4) vision"),
        (line_with(images=[{"width": -1, "height": 1}]), "an image of -1x1 pixels"),
        (line_with(correct="yes"), "'yes' in the place of true or false"),
        (line_with(replaced={}), "{} in the place of true or false"),
    ],
)
def test_what_is_no_record_is_refused_with_a_reason(line, message):
    with pytest.raises(DataError, match=re.escape(message)):
        decode_record(line)


ANY_NUMBER = st.integers() | st.sampled_from([10**400, 1e300]) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | ANY_NUMBER | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
FIELDS = [*(field.name for field in fields(Completion)), "step", "time", "completions"]


@given(st.sampled_from(FIELDS), JSON)
def test_values_of_any_type_give_a_reason_or_a_record_that_can_be_shown(name, value):
    line = line_with(**{name: value}) if name in FIELDS[:-3] else json.dumps({**json.loads(line_with()), name: value})
    try:
        record = decode_record(line)
    except DataError:
        return
    encode_record(record)
    for shown in record.completions:
        assert shown.solution is None or isinstance(shown.solution, str)
        assert shown.correct in (None, True, False)


@pytest.mark.parametrize(
    ("version", "message"),
    [(2, "reads versions up to 1: install a later one"), (0, "versions are integers from 1"), (None, "version None"),
     (True, "version True"), ("1", "version '1'")],
)  # fmt: skip
def test_other_versions_are_refused(version, message):
    line = json.dumps({"version": version, "step": 0, "mode": "train", "completions": [], "values": {}})
    for decode in (decode_record, decode_log):
        with pytest.raises(DataError, match=message):
            decode(line)


@given(st.dictionaries(TEXT, st.none() | SHORT, max_size=4))
def test_a_log_entry_comes_back_as_it_was(values):
    entry = LogEntry(3, "eval", 2.5, values)
    assert decode_log(encode_log(entry)) == entry


def test_a_damaged_log_entry_is_refused():
    for damaged in ('0,"values":[1]', '1e999,"values":{}', '0,"values":{"loss":1' + "0" * 400 + "}"):
        with pytest.raises(DataError, match="log entry is damaged"):
            decode_log(f'{{"version":1,"mode":"train","step":{damaged}}}')
