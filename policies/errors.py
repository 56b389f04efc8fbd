"""The two ways a run can fail that are not bugs of alloclab itself."""

from collections.abc import Callable


class InputError(ValueError):
    """Bad input. One line: the file and place, what was found, what would be valid."""


class RowError(InputError):
    """A row of a table is not valid. The text names it, counted from 0.

    Attributes:
        where: what the table is, or the file that it is from.
        row: the row, counted from 0.
        text: what was found there and what would be valid.
        before: an earlier row that the text is about, named after it; or None.
        table: what its rows are called.

    >>> error = RowError("request trace", 5, "id 7 was already allocated at", before=3)
    >>> str(error)
    'request trace: row 5: id 7 was already allocated at row 3'
    >>> error.placed("a.csv", lambda table, row: f"line {row + 2}")
    'a.csv: line 7: id 7 was already allocated at line 5'
    """

    def __init__(
        self, where: str, row: int, text: str, before: int | None = None, table: str = "row"
    ) -> None:
        super().__init__(where, row, text, before, table)
        self.where, self.row, self.text, self.before, self.table = where, row, text, before, table

    def __str__(self) -> str:
        return self.placed(self.where, "{} {}".format)

    def placed(self, where: str, place: Callable[[str, int], str]) -> str:
        """The text with other names for the table and, given the table and row, for its rows."""
        text = f"{where}: {place(self.table, self.row)}: {self.text}"
        return text if self.before is None else f"{text} {place(self.table, self.before)}"


class PolicyError(RuntimeError):
    """A policy broke the contract: overlap, misalignment, memory that it does not hold."""
