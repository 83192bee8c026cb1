"""EasyR1 (b44b311) imports `no_init_weights` from where transformers 5 does not have it any more.

Removable when EasyR1 reads it from `transformers.initialization`.
"""

from typing import Any

import transformers.modeling_utils


def put_back_moved_names() -> None:
    """Put the name back where EasyR1 looks for it."""
    utils: Any = transformers.modeling_utils
    if not hasattr(utils, "no_init_weights"):
        from transformers.initialization import no_init_weights

        utils.no_init_weights = no_init_weights
