"""Cornell NLVR (Suhr et al., 2017): is what a person wrote about three boxes of shapes true or false?

Columns: `identifier`, `image`, `sentence`, `label` (`true` or `false`), and `objects`, which is not used.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vgr_trl.data.rows.questions import Candidate, Origin, Question, id_of, make_question, text_of, to_candidates, value_of
from vgr_trl.data.read.sources import Source

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
        )
    ]
