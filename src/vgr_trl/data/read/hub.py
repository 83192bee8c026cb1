"""Names on the hub, which misspelt paths look like."""

import re
from pathlib import Path

from datasets.config import HF_DATASETS_CACHE
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def why_not_on_hub(name: str, kind: str) -> str | None:
    """Return why a model or a dataset (`kind`) is neither in the caches nor on the hub; None where it is.

    The hub is asked once: where it does not answer, its libraries ask six times for each file.
    """
    cached = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if cached.exists() or (Path(HF_DATASETS_CACHE) / name.replace("/", "___")).exists():
        return None
    try:
        get_hf_file_metadata(hf_hub_url(name, "README.md", repo_type=kind))
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        is_missing = isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
        return f"it has no {kind} {name}" if is_missing else None
    except Exception as error:  # no connection, by whichever library of HTTP
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None
