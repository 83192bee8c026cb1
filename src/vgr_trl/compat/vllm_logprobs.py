"""Log-probabilities of prompts with images as a server of vLLM 0.32 sends them, for TRL 1.16 to read.

TRL looks for each token's `token`, a text such as "token_id:17", which vLLM sent up to 0.31; from 0.32 on
`/inference/v1/generate` sends its `token_id`, a number, and TRL ends with a KeyError. To be removed with a TRL that
reads both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.generation import vllm_client

from vgr_trl.replacing import replaced


@contextmanager
def readable_logprobs() -> Iterator[None]:
    """In this block TRL's client reads log-probabilities in both forms."""
    plain = vllm_client.parse_logprobs
    with replaced(vllm_client, "parse_logprobs", lambda choices: plain([with_texts(choice) for choice in choices])):
        yield


def with_texts(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the log-probabilities of a completion with a `token` for every `token_id`, also among the most likely."""
    if logprobs is None or not logprobs.get("content"):
        return logprobs
    return {
        **logprobs,
        "content": [
            {**_with_text(entry), "top_logprobs": [_with_text(top) for top in entry.get("top_logprobs") or []]}
            for entry in logprobs["content"]
        ],
    }


def _with_text(entry: dict[str, Any]) -> dict[str, Any]:
    return entry if "token" in entry else {**entry, "token": f"token_id:{entry['token_id']}"}
