"""Cornell NLVR (Suhr et al., 2017): is what a person wrote about three boxes of shapes true or false?

Columns: `identifier`, `image`, `sentence`, `label` (`true` or `false`), and `objects`, JSON with a
`box` [left, top, width, height] in pixels per object (not in train).
"""

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from vgr_trl.data.read.sources import Source
from vgr_trl.data.rows.questions import (
    Candidate,
    Origin,
    Question,
    id_of,
    make_question,
    text_of,
    to_candidates,
    value_of,
)

CHOICES = ["true", "false"]


def read(source: Source) -> Iterator[Candidate]:
    """Yield the questions of `source`, or why a row is none."""
    return to_candidates(source.records(), _questions)


def _questions(origin: Origin, row: Mapping[str, Any]) -> list[Question]:
    label, image = row.get("label"), value_of(row, "image")
    return [
        make_question(
            id=id_of(row, origin, "identifier"),
            source="NLVR",
            problem=f"Is this statement about the image true or false? {text_of(row, 'sentence').strip()}",
            choices=CHOICES,
            answer=str(label).lower() if isinstance(label, bool) else label,
            images=[] if image is None else [image],
            regions=_boxes(row.get("objects"), image),
        )
    ]


def _boxes(objects: Any, image: Any) -> list[list[float]]:
    """Of all objects, as shares of the image; none where they or its size cannot be read."""
    try:
        wide, high = (image if isinstance(image, Image.Image) else Image.open(io.BytesIO(image["bytes"]))).size
        boxes = [[float(side) for side in found["box"]] for found in json.loads(objects)]
        return [[left / wide, top / high, width / wide, height / high] for left, top, width, height in boxes]
    except (OSError, ValueError, TypeError, KeyError):
        return []
