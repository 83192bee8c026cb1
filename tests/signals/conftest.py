"""The tiny models of the tests of prompt sharing."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "sharing"))
