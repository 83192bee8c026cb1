"""The tiny models and questions of the tests of prompt sharing."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "sharing"))

from tiny_questions import image_rows, vision  # noqa: F401
