"""Numbers with units as open answers: what the list of units takes, and what it must not take."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgr_trl.rewards import accuracy_reward
from vgr_trl.rewards.answers import read_quantity, read_unit


def reward(answer, gold):
    return accuracy_reward([f"<answer>{answer}</answer>"], [gold])[0]


NOT_FIVE = [
    # scale words, and other words that make another number of it
    "5 millions", "5 million", "5 thousandths", "5 thousand", "5 thousands", "5 k", "5 K", "5k", "5K", "5 M", "5M",
    "5 m.n",
    "5 bn", "5 b", "5 B", "5 T", "5 G", "5 crore", "5 crores", "5 lakh", "5 lakhs", "5 mil", "5 mln", "5 hundred",
    "5 hundreds", "5 hundredths", "5 tenths", "5 tens", "5 dozen", "5 dozens", "5 score", "5 gross", "5 half",
    "5 halves",
    "5 thirds", "5 quarters", "5 billion", "5 trillion", "5 googol", "5 zillion", "5 pct", "5 percent", "5 %", "5%",
    "5％",
    "5‰", "5 per mille", "5 permille", "5 bps", "5 negative", "5 minus", "5 below", "5 less", "5 more", "5 over",
    "5 six",
    "5 fifths", "5 point five", "5 and a half", "5 squared", "5 cubed", "5 factorial", "5 times", "5 tenfold", "5 fold",
    "5 or", "5 or 6", "5 or so", "5 and 6", "5 to 6", "5 x 2", "5 mod 3", "5 remainder 1", "5 r 1", "5 plus",
    # Chinese scale characters and ends of numbers
    "5万", "5 万", "5千", "5百", "5十", "5亿", "5兆", "5成", "5折", "5倍", "5半", "5点五", "5万元", "5千元", "5亿元",
    "5分之一", "百分之5",
    "五", "5又1/2", "5多", "5几",
    # things, dates and times are no units
    "5 dogs", "5 apples", "5 May", "5 pm", "5am", "5 am", "5 o'clock", "5 BC", "5 AD", "5th", "5 th", "5s", "5 East",
    # variables and algebra
    "5x", "5 x", "5m", "5n", "5 n", "5 a", "5 i", "5i", "5j", "5 e", "5y", "x5", "5 v", "5 c", "5 f", "5 j", "5 w",
    "5!",
    # ranges, lists, comparisons, signs and fragments
    "5-6", "5–6", "5—6", "5~6", "5, 6", "5,6", "5;6", "5/6", "5:6", "5 5", "55", "-5", "−5", "–5", "‑5", "﹣5", "－5",
    "- 5",
    "±5", "~5", "≈5", "<5", ">5", "≤5", "x>5", "x≠5", "5-", "5+", "5/", "5=", "5^", "5_1", "5_2", "5 _", "(5", "5)",
    "5?",
    "5'", '5"', "five", "V", "#5", "No. 5", "about 5", "not 5", "5 (approx.)", "5..5", "0x5", "5e", "5e1", "5 e1",
    "5 × 10",
    "5×10^3", "5*10^3", r"5\times10^{3}", "5²", "5³", "5^2", "5⁴", "5½", "5 1/2", "5.5", "5.0001", "50", "0.5", "05.5",
    "5 km/", "5 /s", "5 km/dog", "5 dogs/day", "5 million km", "5 k m", "5 km 6", "5 km or 6 km", "5 cm, 6 cm",
    "5 min 30 s",
    "$5 million", "$5k", "$5M", "$5 km", "$5€", "-$5", "$-5", "US$-5", "($5)", "5 million dollars", "5 k$",
    "5 hundred USD",
    r"5\%", r"5\text{ million}", r"5\,\text{k}", r"5\cdot", r"\frac{5}{6}", r"5\pi", r"5\sqrt{2}", r"5\infty",
    "5 mm million",
    "5 cm^4", "5 cm^", "5 square", "5 square million", "5 cubic", "5 sq", "5 degrees million", "5 °K", "", " ",
    "\u200b",
]  # fmt: skip


@pytest.mark.parametrize("answer", NOT_FIVE)
def test_another_number_than_five(answer):
    assert reward(answer, "5") == 0.0
    assert reward(answer, 5) == 0.0
    if answer.strip(" \u200b"):
        assert reward("5", answer) == 0.0


FIVE = [
    "5", "5.", "5.0", "+5", "５", "$5$", "**5**", "5 cm", "5cm", "5 centimetres", "5 centimeter", "5 Meters", "5 m",
    "5 m²",
    "5 m^2", "5m^2", "5 m^{2}", "5 m2", "5 square metres", "5 sq. ft", "5 cubic inches", "5 平方米", "5平方厘米",
    "5立方米", "5㎡",
    "5 km/h", "5 km per hour", "5 miles per hour", "5 m/s^2", "5 m/s²", "5 kg/m³", "5 g/cm^3", "5 N/m", "5 mph",
    "5%%"[:1],
    "5 kg", "5公斤", "5千克", "5 千米", "5 mins", "5 minutes", "5 hrs", "5小时", "5 years", "5 years old", "5岁",
    "5 days", "5天",
    "5°", "5 °", "5 degrees", "5º", "5˚", "5 °C", "5°C", "5℃", "5 ℃", "5 °F", "5℉", "5 degrees Celsius", "5 celsius",
    "5度",
    "5摄氏度", r"5^\circ", r"5^{\circ}", r"5^\circ\text{C}", r"5\degree", r"5\,\text{cm}", r"5\text{ cm}",
    r"5~\mathrm{kg}",
    r"5 \text{ cm}^2", "5 μm", "5 µm", "5 Ω", "5 Ω", "5 kΩ", "5 ohms", "5 V", "5 A", "5 N", "5 J", "5 W", "5 kWh",
    "5 Hz",
    "$5", "$ 5", "$5.00", r"\$5", "US$5", "5 dollars", "5 USD", "$5 USD", "€5", "5€", "5 euros", "£5", "¥5", "￥5",
    "5元", "5 yuan",
    "5个", "5只", "5人", "5 units", "5 square units", "5 pixels", "5 KM", "5 Kg", "5 cm.", "5 l", "5 L", "5 litres",
    "5e0", "0.5e1", "0.5×10^1", r"50\times10^{-1}", "5*10^0", "10/2", r"\frac{10}{2}", "5/1",
]  # fmt: skip


@pytest.mark.parametrize("answer", FIVE)
def test_five_with_or_without_a_unit(answer):
    assert reward(answer, "5") == 1.0
    assert reward("5", answer) == 1.0
    assert reward("6", answer) == 0.0
    assert reward("-5", answer) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("37.5 °C", "37.5℃"), ("37.5 °C", "37.5 degrees Celsius"), ("37.5", "37.5 °C"), ("37.5 °C", "37.5"),
        ("98.6 °F", "98.6"), (r"37.5^\circ\text{C}", "37.5 °C"), ("60 km/h", "60 kilometres per hour"),
        ("3 m²", "3 square meters"), ("3 m^2", "3 平方米"), ("12 cm", "12 centimeters"),
        ("3.0×10^8 m/s", "300000000 m/s"),
        ("1,000 km", "1000 kilometers"), ("-$5", "$-5"), ("-$5", "−5"), ("-5", "–5 °C"), ("5 mW", "5 milliwatts"),
        ("50%", "0.5"), ("50%", "50 pct"), ("50 %", r"50\%"), ("1/7", "14.2857%"), ("5 min", "5 minutes"),
        ("5 dogs", "5 Dogs."),
        ("1,234,567", "1234567"), ("1，234", "1234"), (".5", "0.50"), ("-1/2", "-0.5"), (r"-\frac{1}{2}", "−1/2"),
    ],
)  # fmt: skip
def test_same_quantity(gold, answer):
    assert reward(answer, gold) == reward(gold, answer) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("37.5 °C", "37.5 °F"), ("37.5 °C", "37.5°"), ("5 mW", "5 MW"), ("5 mPa", "5 MPa"), ("5 m", "5 m^2"),
        ("5 m^2", "5 m^3"),
        ("5 m/s", "5 m"), ("5 km/h", "5 m/s"), ("5 m/s", "5 m/s^2"), ("5 g", "5 kg"), ("$5", "£5"), ("$5", "5 cents"),
        ("5 lb", "£5"), ("0.05 m", "5%"), ("5%", "0.05 kg"), ("-1/2", "1/2"), ("1/2", "-0.5"),
        (r"-\frac{3}{4}", "0.75"),
        ("-1/7", "0.142857"), ("1/7", "-0.142857"), ("0,500", "500"), ("01,000", "1000"), ("1,00", "100"),
        ("1,0000", "10000"),
        ("1,000", "1.000"), ("3.5", "3,5"), ("1.000.000", "1000000"), ("1 000", "1000"), ("5 min", "5 s"),
        ("5 years", "5 months"),
        ("3m", "3"), ("3 apples", "3"), ("3 k", "3000"), ("2020-01-02", "2020"), ("12:30", "12"), ("5 kB", "5 MB"),
    ],
)  # fmt: skip
def test_another_quantity(gold, answer):
    assert reward(answer, gold) == reward(gold, answer) == 0.0


# 1/7 = 0.142857 142857 …, 2/3 = 0.666666 6…: rounded or cut, no other last digit.
@pytest.mark.parametrize(
    ("fraction", "right", "wrong"),
    [
        ("1/7", ["0.142857", "0.1428571", "0.14285714", "0.1428571428", "0.1428571429"],
         ["0.142858", "0.142856", "0.1428572", "0.142857142858", "0.14286", "0.1428", "0.15"]),
        ("2/3", ["0.666666", "0.666667", "0.66666667", "66.6667%"],
         ["0.666665", "0.666668", "0.66667", "0.67", "66.6668%"]),
        ("-1/7", ["-0.142857", "−0.1428571"], ["-0.142858", "-0.142856", "0.142857"]),
        ("22/7", ["3.142857", "3.1428571"], ["3.142858", "3.141593", "3.14"]),
        ("1/30000", ["0.0000333333", "0.000033333"], ["0.000033", "0.0000", "0"]),
        ("10001/1000003", ["0.010000", "0.010001"], ["0.010002", "0.009999", "0.01"]),  # 0.0100009699…: five digits
        ("19999/2000001", ["0.00999949", "0.0099995"], ["0.009999", "0.010000"]),  # 0.0099994950…: four say too little
        ("1/81000000", ["0.0000000123456", "0.0000000123457"], ["0.000000", "0.000000012", "0.0000000123455"]),
    ],
)  # fmt: skip
def test_fraction_as_decimals(fraction, right, wrong):
    assert [reward(answer, fraction) for answer in right] == [1.0] * len(right)
    assert [reward(answer, fraction) for answer in wrong] == [0.0] * len(wrong)
    assert [reward(fraction, gold) for gold in wrong] == [0.0] * len(wrong)


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(6, 12), st.integers(-3, 3))
def test_only_the_rounded_and_the_cut_value_are_the_fraction(above, below, decimals, off):
    exact = Fraction(above, below)
    units = abs(exact) * 10**decimals
    cut, rounded = int(units), int(units + Fraction(1, 2))
    stated = cut + off
    if stated < 0 or max(cut, stated) < 10**4:  # fewer than five digits say too little
        return
    text = f"{'-' if above < 0 else ''}{stated // 10**decimals}.{stated % 10**decimals:0{decimals}d}"
    assert read_quantity(text).equals(read_quantity(f"{above}/{below}")) == (
        stated in (cut, rounded) or stated == units
    )


@given(st.from_regex(r"[a-z]{2,12}", fullmatch=True))
def test_a_word_behind_a_number_is_ignored_only_if_it_is_a_unit(word):
    assert reward(f"5 {word}", "5") == float(read_unit(word) is not None)


SCALES = st.sampled_from(
    "hundred thousand million billion trillion dozen lakh crore k K M B bn 万 亿 千 百 half".split()
)


@given(st.integers(1, 999), SCALES, st.sampled_from(["", "s", "th", "ths"]), st.sampled_from(["", " "]))
def test_no_scale_word_is_a_unit(number, scale, ending, gap):
    assert reward(f"{number}{gap}{scale}{ending}", str(number)) == 0.0


@settings(max_examples=200)
@given(st.text("5,.0-+/ eE%$°kmc^2×()", max_size=8), st.text("5,.0-+/ eE%$°kmc^2×()", max_size=8))
def test_reading_quantities_is_symmetric_and_never_fails(first, second):
    quantities = [read_quantity(first), read_quantity(second)]
    if None not in quantities:
        assert quantities[0].equals(quantities[1]) == quantities[1].equals(quantities[0])
        assert quantities[0].equals(quantities[0])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("cm", "cm"), ("Centimetres", "cm"), ("厘米", "cm"), ("㎝", "cm"), ("CM", "cm"), ("sq. cm", "cm^2"),
        ("cm²", "cm^2"),
        ("cm^{2}", "cm^2"), ("cm2", "cm^2"), ("square centimeters", "cm^2"), ("square cm^2", None),
        ("平方厘米", "cm^2"),
        ("miles per hour", "mi/h"), ("km / h", "km/h"), ("m/s^2", "m/s^2"), ("m/s/s", None), ("per hour", None),
        ("/h", None),
        ("mW", "mW"), ("MW", "MW"), ("mw", None), ("Ms", None), ("Kg", "kg"), ("KWH", "kWh"), ("M", None),
        ("k", None), ("", None), ("thousand", None), ("s2", None),
        ("lbs.", "lb"), ("lbs..", None), ("°C", "°C"), ("degrees Celsius", "°C"), ("degrees  celsius", "°C"),
    ],
)  # fmt: skip
def test_names_of_units(spelling, name):
    assert read_unit(spelling) == name


@pytest.mark.parametrize("unit", ["m", "g", "s", "N", "s^2", "A^2"])
def test_letter_attached_to_a_number_is_a_variable(unit):
    assert read_unit(unit) is not None
    assert read_unit(unit, attached=True) is None


def test_long_texts_are_no_quantities():
    assert read_quantity("1" * 100) is not None
    assert read_quantity("1" * 101) is None
    assert read_quantity("5\u2028cm") is None
