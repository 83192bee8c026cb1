"""What the libraries raise for data that cannot be read, as the library's own error."""

from collections.abc import Iterator
from contextlib import contextmanager

from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError
from pyarrow.lib import ArrowException

from vgr_trl.errors import DataError, VGRError, words_of


@contextmanager
def readable(source: str | None, name: str, only_reads: bool = False) -> Iterator[None]:
    """Turn what reading `source` raises, at the start or in the midst of a stream, into a `DataError`.

    Args:
        name: of the option that says so.
        only_reads: whether nothing else happens in the block, so that errors of values are the data's too.
    """
    try:
        yield
    except VGRError:
        raise
    except (DatasetNotFoundError, ConnectionError) as error:
        raise DataError(f"No data set is found at {source} ({words_of(error, 300)}): check {name}.") from error
    except (DatasetGenerationError, ArrowException, UnicodeError, DataFilesNotFoundError) as error:
        cause = error.__cause__ or error
        raise DataError(f"{source} cannot be read ({words_of(cause, 300)}): check that the file is whole.") from error
    except OSError as error:
        if error.errno is not None:  # of the system, a full disk for example; pyarrow's of damaged files have none
            raise
        raise DataError(f"{source} cannot be read ({words_of(error, 300)}): check that the file is whole.") from error
    except (ValueError, RecursionError, StopIteration) as error:  # of damaged JSON, by its reader in `datasets`
        if not only_reads:
            raise
        raise DataError(
            f"{source} cannot be read ({words_of(error, 300)}): check {name}, and that it is whole."
        ) from error
