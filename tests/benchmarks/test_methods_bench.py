"""The bench of methods: its questions, its controls, and the arithmetic of its leaderboard, by hand."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from vgr_trl.demo.dataset import words_of
from vgr_trl.demo.tiny_processor import build_processor

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("count", "before"), [(0, (0, 0, 0)), (8, (3, 3, 2)), (32, (11, 11, 10))])
def test_style_stands_before_the_words_that_are_read_off(count, before, module):
    fillers = module("methods.fillers")
    thought = fillers.with_style({"thought": "a red cross southeast"}, count, random.Random(0))["thought"].split()
    places = [thought.index(word) for word in ("red", "cross", "southeast")]
    assert thought[0] == "a"
    assert tuple(end - start - 1 for start, end in zip([0, *places], places, strict=False)) == before
    assert all(word in fillers.STYLE for place, word in enumerate(thought) if place not in (0, *places))


def test_paraphrases_stand_behind_what_they_say_again(module):
    """Sixteen are six, five and five: a word of style and another word for the one before."""
    fillers = module("methods.fillers")
    words = fillers.with_paraphrases({"thought": "a red cross southeast"}, 16, random.Random(0))["thought"].split()
    assert [words[place] for place in (0, 1, 14, 25)] == ["a", "red", "cross", "southeast"]
    spans = (words[2:14], words[15:25], words[26:])
    assert [len(span) for span in spans] == [12, 10, 10]
    assert {word for span in spans for word in span[::2]} <= set(fillers.STYLE)
    for word, span in zip(("red", "cross", "southeast"), spans, strict=True):
        assert set(span[1::2]) <= set(fillers.OTHER_WORDS[word])


def test_sums_follow_from_the_words_that_were_read(module):
    """Red, cross and southeast are 1, 4 and 4: 1, 5, 9, and 10 of which the last digit counts."""
    fillers = module("methods.fillers")
    due = "a red cross southeast plus 1 makes 1 plus 4 makes 5 plus 4 makes 9 plus 1 makes 0"
    assert fillers.with_sums({"thought": "a red cross southeast"}, 4)["thought"] == due
    said = due.replace("makes 5", "makes 6").split()
    assert fillers.right_sums(said, ["whatever", "is", "shown"]) == [True, False, True, True]
    assert fillers.right_sums("a red plus 1 makes".split(), []) == [False]


def test_a_paraphrase_is_right_of_the_image_not_of_the_word_before(module):
    right = module("methods.fillers").right_paraphrases("a red so ruby so azure".split(), "a blue cross".split())
    assert right == [False, True]


def test_words_of_filler_are_no_words_that_are_read_off(module):
    """But for paraphrases, every one of which says one word."""
    fillers, tasks = module("methods.fillers"), module("methods.tasks")
    drawn = {word for family in tasks.DRAWN.values() for word in family}
    assert len(fillers.MEANT) == 36
    assert drawn.isdisjoint((*fillers.STYLE, *fillers.MEANT, *fillers.ARITHMETIC))
    assert set(fillers.MEANT).isdisjoint(fillers.STYLE)


def test_a_start_doubts_paraphrases_and_not_sums(module):
    """Of 48,000 paraphrases 0.4 are wrong, and as many where the word before is right; sums follow what is said."""
    tasks = module("methods.tasks")
    again = tasks.TASKS["paraphrase-32"]
    questions = again.questions(0)
    wrong, after_right = [], []
    for row, doubtful in zip(questions.train, questions.text, strict=True):
        truth, said = row["thought"].split(), doubtful["thought"].split()
        assert all(again.filler_right(truth, truth))
        right = again.filler_right(said, truth)
        wrong += [not each for each in right]
        after_right += [not each for each in right[:6] if said[1] == truth[1]]
    assert len(wrong) == 48000
    for found in (wrong, after_right):
        assert sum(found) / len(found) == pytest.approx(0.4, abs=4 * (0.24 / len(found)) ** 0.5)
    summed = tasks.TASKS["arithmetic-32"]
    for row, doubtful in zip(summed.questions(0).train, summed.questions(0).text, strict=True):
        said = doubtful["thought"].split()
        assert all(summed.filler_right(said, row["thought"].split()))
        assert doubtful["solution"] in said[1:4]


def test_the_oracle_keeps_what_needs_the_image(module):
    """Of 42 tokens the three words and the answer; sixteen paraphrases more, and no sum. The filters keep as many."""
    tasks, contenders = module("methods.tasks").TASKS, module("methods.contenders")
    for name, number in (("style-32", 4), ("arithmetic-32", 4), ("paraphrase-32", 20)):
        task = tasks[name]
        row = task.questions(0).test[0]
        tokenizer = build_processor(words_of([row])).tokenizer
        ids = tokenizer(words_of([row])[1]).input_ids
        known = contenders.METHODS["oracle"].options_for(task, tokenizer)["plugin_options"]
        assert sum(each in known["perceived_ids"] for each in ids) == number
        assert sum(each in known["filler_ids"] for each in ids) == 32
        kept = contenders.METHODS["perception filter"].options_for(task, tokenizer)["top_p_perception_tokens"]
        assert kept == pytest.approx(number / 42)


@pytest.mark.parametrize("name", ["style-0", "style-8", "style-32", "paraphrase-32", "arithmetic-32"])
def test_a_whole_answer_has_as_many_tokens_as_the_task_says(name, module):
    """`<think>`, a, three words, `</think><answer>`, the answer, `</answer>` and the end are 10 without style."""
    task = module("methods.tasks").TASKS[name]
    rows = task.questions(0).test[:20]
    tokenizer = build_processor(words_of(rows)).tokenizer
    lengths = {len(tokenizer(words_of([row])[1]).input_ids) for row in rows}
    assert lengths == {task.plain_length} == {10 + int(name.partition("-")[2])}


@pytest.mark.parametrize(("name", "in_start"), [("hinted", 0.25), ("hinted-start", 0.7)])
def test_hints_are_true_as_often_as_said(name, in_start, module):
    """1,600 draws of 0.7 and 320 of 0.25 are within four standard deviations."""
    task = next(task for task in module("methods.hints").HINTED if task.name == name)
    questions = task.questions(0)
    for rows, share in ((questions.train[:1600], 0.7), (questions.test, 0.25), (questions.text[:1600], in_start)):
        true = [row["problem"].split("?")[0] == row["solution"] for row in rows]
        assert [row["hint"] == "true" for row in rows] == true
        assert sum(true) / len(true) == pytest.approx(share, abs=4 * (share * (1 - share) / len(true)) ** 0.5)


def test_a_start_learns_from_thoughts_that_are_wrong_as_often_as_said(module):
    """Of 9,000 words 0.4 are others of their families, within four standard deviations; answers repeat thoughts."""
    tasks = module("methods.tasks")
    questions = tasks.TASKS["style-8"].questions(0)
    family_of = {word: family for family in tasks.DRAWN.values() for word in family}
    wrong = []
    for row, doubtful in zip(questions.train, questions.text, strict=True):
        pairs = list(zip(row["thought"].split(), doubtful["thought"].split(), strict=True))
        wrong += [said != word for word, said in pairs if word in family_of]
        assert all(said in family_of.get(word, (word,)) for word, said in pairs)
        assert (row["solution"], doubtful["solution"]) in pairs
    assert len(wrong) == 9000
    assert sum(wrong) / 9000 == pytest.approx(tasks.DOUBT, abs=4 * (0.24 / 9000) ** 0.5)


def test_thoughts_and_answers_are_judged_apart(module):
    """Of two texts one has all three words and answers red; one has two, and answers the red that it thought of."""
    rows = [{"thought": "a blue cross southeast", "family": "colour", "solution": "blue"}]
    texts = ["a so blue cross southeast</think><answer>red", "a red cross southeast</think><answer>red"]
    sampled = [f"<think>{text}</answer>" for text in texts]
    seen = SimpleNamespace(records=[{"sampled": sampled}])
    tasks = module("methods.tasks").TASKS
    found = module("methods.thoughts").in_thoughts(seen, rows, tasks["style-8"])
    assert found == {"thoughts": round(5 / 6, 4), "asked": 0.5, "follows": 0.5}
    none = module("methods.thoughts").in_thoughts(seen, rows, tasks["arithmetic-32"])
    assert none == found | {"filler": 0}


def test_controls_keep_equally_many_tokens(module):
    """Of ids 5 and 7 the first completion has two, the second one, the third none: all of it is kept."""
    controls = module("methods.controls")
    ids = torch.tensor([[5, 1, 7, 1], [1, 5, 1, 5], [1, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    given = torch.ones(3), None, mask, SimpleNamespace(perceived_ids=[5, 7])
    kept, _ = controls.oracle(*given, completion_ids=ids)
    assert kept.tolist() == [[True, False, True, False], [False, True, False, False], [True, True, False, False]]
    drawn = torch.stack([controls.at_random(*given, completion_ids=ids)[0] for _ in range(200)])
    given[-1].filler_ids = [1]
    without = controls.no_filler(*given, completion_ids=ids)[0]
    assert without.tolist() == [[True, False, True, False], [False, True, False, False], [False] * 4]
    assert (drawn.sum(2) == torch.tensor([2, 1, 2])).all()
    assert not (drawn & ~mask).any()
    assert drawn[:, 0].float().mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.15)


@pytest.mark.parametrize(
    ("accuracy", "tokens"), [(0.4, 0), (0.5, 50), (0.6, 100), (0.65, 250), (0.7, 300), (0.71, None)]
)
def test_tokens_to_an_accuracy_lie_on_a_line_between_points(accuracy, tokens, module):
    """0.4 at 0 tokens, 0.6 at 100, 0.55 at 200, 0.75 at 300 would reach 0.65 half way from 200 to 300."""
    course = [(0, 0, 0.4), (1, 100, 0.6), (2, 200, 0.6), (3, 300, 0.7)]
    assert module("methods.seeds").tokens_to(course, accuracy) == (None if tokens is None else pytest.approx(tokens))


def test_an_interval_holds_the_mean_and_widens_with_the_spread(module):
    interval = module("methods.seeds").interval
    assert interval([0.5, 0.5, 0.5]) == (0.5, 0.5)
    low, high = interval([0.4, 0.6])  # of four equally likely resamples one mean is 0.4, two 0.5, one 0.6
    assert (low, high) == (0.4, 0.6)


def test_tokens_are_those_of_the_mean_course(module):
    """The baseline's mean ends at 0.6; the other's is 0.4, 0.5, 0.7 at 0, 100, 200 tokens: there after 150 of 200."""
    share = module("methods.seeds").token_share
    baseline = [[(0, 0, 0.4), (1, 200, end)] for end in (0.5, 0.7)]
    courses = [[(0, 0, 0.4), (1, 100, 0.4 + more), (2, 200, 0.6 + more)] for more in (0.0, 0.2)]
    assert share(courses, baseline) == pytest.approx(0.75)
    assert share(baseline[:1], baseline) == float("inf")


def test_doses_are_of_methods_that_ran_on_several(module):
    board = module("methods.leaderboard")
    runs = [
        board.Run(task, method, seed, 1e-3, {"accuracy": 0.5 + seed / 10, "course": [(0, 0, 0.3)]})
        for task, methods in (("style-32", ("plain", "random")), ("style-8", ("plain",)), ("other", ("plain",)))
        for method in methods
        for seed in (0, 1)
    ]
    assert board.dose_accuracies(runs) == {
        "start": {8: [0.3, 0.3], 32: [0.3, 0.3]}, "plain": {8: [0.5, 0.6], 32: [0.5, 0.6]},
    }  # fmt: skip


def test_a_table_ranks_methods(module):
    """Plain DAPO ends at 0.6 after 100 tokens; the other is there after 50: 0.50 of its tokens."""
    board = module("methods.leaderboard")
    runs = [
        board.Run("style-0", method, 0, 1e-3, {
            "course": [(0, 0, 0.4), (1, 50, middle), (2, 100, end)], "accuracy": end, "thoughts": 0.5, "asked": 0.5,
            "follows": 1.0, "blanked": 0.25, "late VGR": 1.0, "dependency": 0.1, "CPU seconds per step": 0.2,
        })
        for method, middle, end in (("plain", 0.5, 0.6), ("oracle", 0.6, 0.7))
    ]  # fmt: skip
    *_, first, second = board.table(runs, {"plain": 2})
    assert first.startswith(
        "| oracle | 0.001 | 0 | 1 | 0.700 | 0.700 to 0.700 | +0.300 | +0.100 (+0.100 to +0.100) | 0.50 (0.50 to 0.50) |"
    )
    assert second.startswith(
        "| plain | 0.001 | 2 | 1 | 0.600 | 0.600 to 0.600 | +0.200 | +0.000 (+0.000 to +0.000) | 1.00 (1.00 to 1.00) |"
    )


def test_what_is_there_is_not_run_again(module, monkeypatch, tmp_path):
    """Of two methods and two rates one run is kept; the best rate is that of the tuning seed."""
    main, board = module("methods.__main__"), module("methods.leaderboard")
    for each in (main, board):
        monkeypatch.setattr(each, "RESULTS", tmp_path / "methods")
    settings = module("methods.runs").Settings()
    flags = main.parse_flags(
        ["--methods", "plain", "oracle", "--learning_rates", "0.1", "0.2", "--tuning_seeds", "100"]
    )
    main.keep(board.Run("style-0", "plain", 100, 0.2, {"accuracy": 0.7}), settings)
    waiting = list(main.missing(flags, settings, "style-0", 100, main.rates_to_try))
    assert waiting == [("plain", 0.1), ("oracle", 0.1), ("oracle", 0.2)]
    main.keep(board.Run("style-0", "plain", 100, 0.1, {"accuracy": 0.6}), settings)
    assert next(main.missing(flags, settings, "style-0", 0, main.chosen_rate)) == ("plain", 0.2)


def test_a_rate_is_chosen_by_the_mean_over_the_tuning_seeds(module):
    """0.7 and 0.5 are less than 0.6 and 0.65 on average; another method and the measured seeds have no say."""
    board = module("methods.leaderboard")
    plain = [("plain", 100, 0.1, 0.7), ("plain", 101, 0.1, 0.5), ("plain", 100, 0.2, 0.6), ("plain", 101, 0.2, 0.65)]
    tried = [*plain, ("oracle", 100, 0.1, 0.9), ("plain", 0, 0.1, 0.9)]
    runs = [board.Run("style-0", method, seed, rate, {"accuracy": found}) for method, seed, rate, found in tried]
    assert board.best_rate(runs, "style-0", "plain") == 0.2
    assert board.best_rate(runs, "style-8", "plain") is None
    assert board.tuned_on(runs, "style-0") == {"plain": 2, "oracle": 1}


def test_a_start_that_believes_hints_says_half_of_them_whatever_is_shown(module):
    """Of 3,000 rows half say their hint; the others have the word asked for in three of five."""
    hints = module("methods.hints")
    task = next(task for task in hints.HINTED if task.name == "hinted-copied")
    questions = task.questions(0)
    misled = [
        (row, plain) for row, plain in zip(questions.text, questions.train, strict=True) if row["hint"] == "false"
    ]
    said = [row["solution"] == row["hint_word"] for row, _ in misled]
    true = [row["solution"] == plain["solution"] for row, plain in misled]
    # copied, or by doubt one of the three wrong words: 0.5 + 0.5 x 0.4 / 3; else the truth of 0.6
    for found, share in ((said, 0.5 + 0.2 / 3), (true, 0.3)):
        assert sum(found) / len(found) == pytest.approx(share, abs=4 * (share * (1 - share) / len(found)) ** 0.5)
    assert all(row["solution"] in row["thought"].split() for row in questions.text)
    assert all("? which" in row["problem"] and row["problem"].startswith(row["hint_word"]) for row in questions.train)


@pytest.mark.skipif(not (ROOT / "../shared/data/easy_vqa").is_dir(), reason="easy-VQA is not at ../shared/data")
def test_hints_of_easy_vqa_are_of_the_family_that_is_asked_for(module, monkeypatch):
    """Two families of three are kept of 4,500, 192 and 480 rows; validation images do nothing else."""
    given = module("methods.given")
    monkeypatch.setattr(given, "DATA", ROOT / "../shared/data/easy_vqa")
    questions = given.believing(0)
    assert [len(questions.train), len(questions.validation), len(questions.test)] == [3000, 128, 320]
    for row in questions.train + questions.test:
        assert {row["hint_word"], row["solution"]} <= set(given.SEEN[row["family"]])
    drawn = [{row["id"].split("-")[1] for row in rows} for rows in (questions.train, questions.validation)]
    assert drawn[0].isdisjoint(drawn[1])


def test_hints_are_replaced_not_piled_up(module):
    row = {"family": "colour", "solution": "red", "problem": "which colour is it?"}
    hints = module("methods.hints")
    (once,) = hints.with_hints([row], 1.0, random.Random(0))
    (twice,) = hints.with_hints([once], 0.0, random.Random(0))
    assert (once["problem"], once["hint"]) == ("red? which colour is it?", "true")
    assert twice["problem"] in {f"{word}? which colour is it?" for word in ("green", "blue", "yellow")}
    assert (twice["hint"], twice["solution"]) == ("false", "red")


def test_copies_are_counted_where_the_hint_misleads(module):
    """Of four answers to misled rows one is the hint; the row whose hint is true does not count."""
    rows = [{"hint": "false", "hint_word": "red"}] * 2 + [{"hint": "true", "hint_word": "red"}]
    texts = [["red", "blue"], ["blue", "blue"], ["red", "red"]]
    records = [{"sampled": [f"<think>a</think><answer>{word}</answer>" for word in some]} for some in texts]
    seen = SimpleNamespace(records=records)
    assert module("methods.reliance").copies(seen, rows) == 0.25


def test_boxes_are_put_in_another_order(module):
    """Columns of a box go with it, the bars between boxes stay."""
    image = Image.new("RGB", (400, 100))
    for place, colour in ((0, "red"), (100, "grey"), (150, "lime"), (250, "grey"), (300, "blue")):
        image.paste(colour, (place, 0, min(400, place + 100), 100))
    drawn = module("nlvr").reordered(image, (2, 0, 1))
    looked = [drawn.getpixel((place, 50)) for place in (0, 99, 120, 150, 249, 270, 300, 399)]
    red, lime, blue, grey = (255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)
    assert looked == [blue, blue, grey, red, red, grey, lime, lime]
