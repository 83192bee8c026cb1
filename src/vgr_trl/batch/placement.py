"""Which process holds which completions of which group."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vgr_trl.errors import DataError

Gather = Callable[[list[Any]], list[Any]]  # a list per process -> their concatenation, in their order, everywhere
Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Placement:
    """How the completions of a rollout batch lie on the processes.

    All rows of all processes, one process after the other, are the completions of one prompt after the other. A group
    is spread over several processes where their rows are no multiple of G.

    Attributes:
        rows: completions on each process, N.
        num_generations: completions per prompt, G.
        process_index: this process.
        num_processes: how many hold `rows` completions each.

    Raises:
        DataError: all rows together are not whole groups.
    """

    rows: int
    num_generations: int
    process_index: int = 0
    num_processes: int = 1

    def __post_init__(self) -> None:
        if self.rows * self.num_processes % self.num_generations:
            raise DataError(
                f"{self.num_processes} processes hold {self.rows} completions each with num_generations "
                f"{self.num_generations}: give whole groups over all processes."
            )

    @property
    def num_groups(self) -> int:
        """Groups on all processes together."""
        return self.rows * self.num_processes // self.num_generations

    def check(self, groups: Iterable[int]) -> None:
        """Raise `DataError` unless every one of `groups` is a number of a group."""
        for group in groups:
            if not 0 <= group < self.num_groups:
                raise DataError(f"There is no group {group}: the batch has the groups 0 to {self.num_groups - 1}.")

    def holders(self, group: int) -> range:
        """The processes that hold completions of `group`."""
        first = group * self.num_generations
        return range(first // self.rows, (first + self.num_generations - 1) // self.rows + 1)

    def here(self, group: int) -> list[tuple[int, int]]:
        """The completions of `group` on this process, as (row of this process, completion of the group) pairs."""
        offset = group * self.num_generations - self.process_index * self.rows
        return [(offset + index, index) for index in range(self.num_generations) if 0 <= offset + index < self.rows]

    def holder(self, group: int) -> int:
        """The process that keeps `group` whole: that of its first completion."""
        return self.holders(group)[0]

    def bring_to_holders(
        self, pieces: Mapping[int, Piece], holders: Mapping[int, int], gather: Gather | None
    ) -> dict[int, list[Piece]]:
        """Return the pieces of the groups that this process is the holder of, in the order of their completions.

        If any of the groups has completions on other processes than its holder, all of them call `gather` once.

        Args:
            pieces: of each group that has completions here, what to bring.
            holders: group -> process that keeps it whole; the same on every process.
            gather: over the processes; None if there is one.
        """
        here = self.process_index
        found = {group: {here: piece} for group, piece in pieces.items() if holders[group] == here}
        travelling = [group for group, holder in holders.items() if list(self.holders(group)) != [holder]]
        if travelling:
            sent = [(group, here, pieces[group]) for group in travelling if group in pieces and group not in found]
            for group, process, piece in checked(gather)(sent):
                if holders[group] == here:
                    found.setdefault(group, {})[process] = piece
        return {group: [parts[process] for process in sorted(parts)] for group, parts in found.items()}


def checked(gather: Gather | None) -> Gather:
    """Return `gather`; raise `DataError` if there is none."""
    if gather is None:
        raise DataError("A group has to go from one process to another: give a gather function that reaches all.")
    return gather
