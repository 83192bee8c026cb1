"""The data sets that can be converted, by name. A new one is a file with a function `read`, and a line here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vgr_trl import registries
from vgr_trl.data.build.sets import aokvqa, arxivqa, easy_vqa, jsonl, mmmu_pro, nlvr
from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.questions import Candidate


@dataclass(frozen=True)
class Converter:
    """How a data set is converted.

    Attributes:
        read: yields its questions, or why a row is none.
        several_images: whether a question may have more than one image, so that rows get `images` instead of `image`.
        regions: whether it says in boxes what a question is about.
        hub_name: read where no source is named; None: a source must be named.
        config: configuration of the hub data set that is read where none is named.
        split: read where none is named.
        count: the number of rows where it is known; None: that of the source.
    """

    read: Callable[..., Iterator[Candidate]]
    several_images: bool = False
    regions: bool = False
    hub_name: str | None = None
    config: str | None = None
    split: str = "train"
    count: Callable[[Source], int | None] = Source.count


CONVERTERS = {
    "aokvqa": Converter(aokvqa.read, hub_name=aokvqa.HUB_NAME),
    "arxivqa": Converter(arxivqa.read, hub_name=arxivqa.HUB_NAME, count=lambda source: source.count("queries")),
    "mmmu_pro": Converter(
        mmmu_pro.read, several_images=True, hub_name=mmmu_pro.HUB_NAME, config=mmmu_pro.HUB_CONFIG, split="test"
    ),
    "jsonl": Converter(jsonl.read, several_images=True),
    "easy_vqa": Converter(easy_vqa.read),
    "nlvr": Converter(nlvr.read, regions=True),
}

for _name, _converter in CONVERTERS.items():
    registries.datasets.register(_name)(_converter.read)


def load_converter(spec: str) -> Converter:
    """Return how the data set that `spec` names is converted.

    Args:
        spec: one of `CONVERTERS`, or the name, dotted path or file of a function that takes a `Source` and yields
            questions; what it has as `converter`, a dict, are arguments of its `Converter`.

    Raises:
        ConfigError: nothing has this name, or it is no function.
    """
    if spec in CONVERTERS:
        return CONVERTERS[spec]
    read = registries.datasets.load(spec)
    return Converter(read, **getattr(read, "converter", {}))
