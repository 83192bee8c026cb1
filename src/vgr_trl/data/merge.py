"""Merge converted sets, with shares, limits and statistics."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from vgr_trl.data import public_sets
from vgr_trl.data.columns import Candidate, Origin, Question, with_images
from vgr_trl.data.convert import Encoded, Output, convert, encoder
from vgr_trl.data.prompts import LETTERS
from vgr_trl.data.public_sets import shuffle_choices
from vgr_trl.data.read import Source
from vgr_trl.rewards.answers import normalise
from vgr_trl.utils import ConfigError, DataError, write_whole

# ---------------------------------------------------------------------------------------------------------------------
# Which rows of several sets go into one, and on which side of its split: functions on what is known of the rows.


@dataclass(frozen=True)
class Row:
    """What is known of a row.

    Attributes:
        source: which set it is in.
        position: which of the set's candidates it is.
        images: hashes of the pixels of its images, then of its video files.
        problem: its question, in normal form.
        answer: its right answer as a text, in normal form.
        choices: its options, in normal form; empty for an open question.
        image_count: how many of `images` are images.
        video_count: how many are videos.
        has_regions: whether it says in boxes what it is about.
    """

    source: int
    position: int
    images: tuple[str, ...]
    problem: str
    answer: str
    choices: frozenset[str] = frozenset()
    image_count: int = 1
    video_count: int = 0
    has_regions: bool = False


def without_duplicates(rows: Sequence[Row]) -> tuple[list[Row], dict[Row, str]]:
    """Return the rows that show other images or ask something else than those before, and why the others are left out.

    Of rows with the same images and question the first stays, unless two contradict each other: then it is not known
    which is right, and none stays.
    """
    alike: dict[tuple[tuple[str, ...], str], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row.images, row.problem].append(row)
    kept, reasons = [], {}
    for same in alike.values():
        if any(_contradict(one, other) for index, one in enumerate(same) for other in same[:index]):
            reasons.update(dict.fromkeys(same, "another row with the same image and question has another answer"))
            continue
        kept.append(same[0])
        reasons.update(dict.fromkeys(same[1:], "it has the same image and question as an earlier row"))
    return sorted(kept, key=lambda row: (row.source, row.position)), reasons


def weighted(rows: Sequence[Row], weights: Sequence[float] | None, seed: int) -> list[Row]:
    """Return the largest choice of `rows` in which the sources are to each other as `weights`; None: all rows.

    Which rows of a source stay depends on `seed` and on their content, not on their order.

    Args:
        rows: without duplicates.
        weights: above 0, one for each source.

    Raises:
        DataError: a source has no rows.
    """
    if weights is None:
        return list(rows)
    by_source: dict[int, list[Row]] = {number: [] for number in range(len(weights))}
    for row in rows:
        by_source[row.source].append(row)
    if empty := [number for number, found in by_source.items() if not found]:
        raise DataError(f"Source {empty[0] + 1} has no row that can be used, so no weight can be given to it.")
    scale = min(len(found) / weight for found, weight in zip(by_source.values(), weights, strict=True))
    kept: list[Row] = []
    for found, weight in zip(by_source.values(), weights, strict=True):
        count = max(1, int(scale * weight + 1e-9))
        kept += sorted(found, key=lambda row: _rank(seed, "weight", *row.images, row.problem))[:count]
    return sorted(kept, key=lambda row: (row.source, row.position))


def split(rows: Sequence[Row], test_share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on and those to test on, such that no image is on both sides.

    Rows that share an image stay together, also over several rows. Sides depend on `seed` and on the images alone.

    Args:
        rows: without duplicates.
        test_share: of the rows to test on, from 0 (none) up to below 1; met as nearly as rows that share images allow.

    Raises:
        DataError: there is no way to split the rows.
    """
    if test_share == 0:
        return list(rows), []
    groups = sorted(sharing_images(rows), key=lambda group: _rank(seed, "split", min(_images(group))))
    wanted, test = min(max(1, round(test_share * len(rows))), len(rows) - 1), set[Row]()
    for group in groups:
        if len(test) + len(group) <= wanted:
            test.update(group)
    if not test:
        smallest = min(groups, key=len)
        test.update(smallest)
    if len(test) == len(rows):
        raise DataError(
            f"The {len(rows)} rows cannot be split, for all are linked by images they share: give test_share 0."
        )
    return [row for row in rows if row not in test], [row for row in rows if row in test]


def sharing_images(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups, such that rows with an image in common are in one group; in order of appearance."""
    leader: dict[str, str] = {}

    def find(image: str) -> str:
        while leader.setdefault(image, image) != image:
            leader[image] = image = leader[leader[image]]
        return image

    for row in rows:
        for image in row.images[1:]:
            leader[find(image)] = find(row.images[0])
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[find(row.images[0])].append(row)
    return list(groups.values())


def interleaved(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the sources spread evenly from start to end; rows of a source keep their order."""
    counts = Counter(row.source for row in rows)
    met: Counter[int] = Counter()
    places = {}
    for row in rows:
        met[row.source] += 1
        places[row] = ((met[row.source] - 0.5) / counts[row.source], row.source)
    return sorted(rows, key=places.__getitem__)


def _contradict(one: Row, other: Row) -> bool:
    """Whether the rows call different answers right where both could have been chosen."""
    if one.answer == other.answer:
        return False
    if not one.choices and not other.choices:
        return True
    return one.answer in other.choices and other.answer in one.choices


def _images(group: Sequence[Row]) -> list[str]:
    return [image for row in group for image in row.images]


def _rank(seed: int, *texts: str) -> str:
    return hashlib.sha256("\0".join([str(seed), *texts]).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Several converted sets become one, without duplicates, with train and test that share no image.
#
# Two passes over the sets: the first looks at every row and makes a plan, the second writes the rows in the plan.


PLAN = ".merge.json"


@dataclass(frozen=True)
class MergeOptions:
    """How sets are merged.

    Attributes:
        weights: one per set, in proportion to which they are represented; None: every row.
        test_share: of the rows, in [0, 1).
        seed: of what is left out by weight, of the split and of the order of options.
        shuffle_choices: whether options are put in another order, right letters coming equally often.
    """

    weights: tuple[float, ...] | None = None
    test_share: float = 0.1
    seed: int = 0
    shuffle_choices: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.test_share < 1:
            raise ConfigError(f"test_share is {self.test_share}: give a number from 0 (no split) up to below 1.")
        if any(not 0 < weight < float("inf") for weight in self.weights or ()):
            raise ConfigError(f"weights is {list(self.weights or ())}: give a number above 0 for each set.")


@dataclass(frozen=True)
class MergePlan:
    """What the first pass found.

    Attributes:
        rows: by split, (set, position in it) in the order in which they are written.
        left_out: file, row and reason.
        several_images: whether a row has another number of images than one.
        videos: whether a row has a video.
        regions: whether a row says in boxes what it is about.
        surplus: rows left out for the weights alone.
    """

    rows: Mapping[str, Sequence[tuple[int, int]]]
    left_out: Sequence[tuple[str, int, str]]
    several_images: bool
    videos: bool
    surplus: int
    regions: bool = False


def merge(sources: Sequence[Source], output: Output, options: MergeOptions, identity: Any) -> MergePlan:
    """Write the rows of `sources` as `train` and `test` to the folder of `output`, continuing what is unfinished.

    Args:
        sources: sets in the schema, as `convert` writes them; JSONL of the user's own too.
        output: where and how; its split and number of images are not read.
        identity: what the result depends on, as JSON.

    Raises:
        ConfigError: an option is out of range, or the folder holds something else.
        DataError: a set cannot be read, no row is left, or there is no way to split.
    """
    path = output.folder / PLAN
    plan = _read_plan(path, identity)
    if plan is None:
        plan = make_plan(sources, output, options)
        output.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"identity": identity, **vars(plan)}, default=str).encode())
    for name, rows in plan.rows.items():
        if not rows:
            continue
        listed = [(Origin(file, row), reason) for file, row, reason in plan.left_out] if name == "train" else []
        candidates: Iterable[Candidate] = chain(listed, _picked(sources, rows))
        if options.shuffle_choices:
            candidates = shuffle_choices(candidates, options.seed)
        part = replace(
            output,
            split=name,
            several_images=plan.several_images,
            videos=plan.videos,
            regions=plan.regions,
            limit=None,
        )
        convert(candidates, part, identity, len(listed) + len(rows))
    return plan


def make_plan(sources: Sequence[Source], output: Output, options: MergeOptions) -> MergePlan:
    """Look at every row of `sources`, and return which are written, and where."""
    if options.weights is not None and len(options.weights) != len(sources):
        raise ConfigError(f"weights has {len(options.weights)} numbers for {len(sources)} sets: give one for each.")
    found: list[Row] = []
    places: dict[tuple[int, int], Origin] = {}
    left_out: list[tuple[str, int, str]] = []
    for origin, row in _seen(sources, output):
        if isinstance(row, str):
            left_out.append((origin.file, origin.row, row))
        else:
            found.append(row)
            places[row.source, row.position] = origin
    if not found:
        first = f"; the first: {left_out[0][2]}" if left_out else ""
        raise DataError(f"None of the {len(left_out)} rows can be used{first}.")
    kept, reasons = without_duplicates(found)
    for row, reason in reasons.items():
        origin = places[row.source, row.position]
        left_out.append((origin.file, origin.row, reason))
    if not kept:
        raise DataError(f"None of the {len(found)} rows is left: {left_out[-1][2]}.")
    chosen = weighted(kept, options.weights, options.seed)
    train, test = split(chosen, options.test_share, options.seed)
    return MergePlan(
        rows={
            name: [(row.source, row.position) for row in interleaved(rows)]
            for name, rows in (("train", train), ("test", test))
        },
        left_out=left_out,
        several_images=any(row.image_count != 1 for row in chosen),
        videos=any(row.video_count for row in chosen),
        surplus=len(kept) - len(chosen),
        regions=any(row.has_regions for row in chosen),
    )


def _seen(sources: Sequence[Source], output: Output) -> Iterator[tuple[Origin, Row | str]]:
    """Yield what is known of each row of `sources`, or why it cannot be used."""
    with encoder(replace(output.encoding, with_digest=True), output.workers) as encode:
        for number, source in enumerate(sources):
            bar = tqdm(
                public_sets.jsonl_read(source), desc=f"look at {source}", total=source.count(), unit=" rows", delay=1
            )
            for position, ((origin, candidate), images) in enumerate(encode(with_images(bar))):
                if isinstance(candidate, str):
                    yield origin, candidate
                elif isinstance(images, str):
                    yield origin, images
                else:
                    try:
                        yield origin, _row(number, position, candidate, images)
                    except OSError as error:
                        yield origin, f"a video of it cannot be read ({error.strerror})"


def _row(source: int, position: int, question: Question, images: Sequence[Encoded]) -> Row:
    choices = question.choices or []
    answer = choices[LETTERS.index(question.solution)] if choices else question.solution
    return Row(
        source,
        position,
        (*(image.digest for image in images), *map(_file_digest, question.videos)),
        normalise(question.problem),
        normalise(answer),
        frozenset(map(normalise, choices)),
        image_count=len(images),
        video_count=len(question.videos),
        has_regions=bool(question.regions),
    )


def _file_digest(path: str) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _picked(sources: Sequence[Source], rows: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Yield the candidates of the plan; each set is read once, from start to end."""
    readers = {number: enumerate(public_sets.jsonl_read(sources[number])) for number in {number for number, _ in rows}}
    for number, position in rows:
        yield next(candidate for index, candidate in readers[number] if index == position)


def _read_plan(path: Path, identity: Any) -> MergePlan | None:
    """The plan that an earlier call has made, if there is one."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        before = found.pop("identity")
        plan = MergePlan(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error!r}): delete {path.parent} or choose another folder."
        ) from error
    if before != json.loads(json.dumps(identity, default=str)):
        raise ConfigError(
            f"{path.parent} holds a merge of other sets, or with other options: choose another folder, or delete it."
        )
    return plan
