"""Events as rows of Python values, put into the columns of a request trace."""

from collections.abc import Iterable, Mapping, Sequence
from operator import and_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alloclab.policies.errors import RowError
from alloclab.simulator.requests import DEFAULT_ALIGNMENT, FREE, OPS, SPACES, RequestTrace
from alloclab.simulator.trace_objects import ABSENT, MAX_INT64, shown

Column = npt.NDArray[Any]


class Field(NamedTuple):
    """What a field of an event may hold, and what it is where it is left out."""

    types: frozenset[type]
    valid: str
    default: Any
    dtype: Any
    needed_by: frozenset[str] = frozenset()


_TEXT, _INTEGER = frozenset({str}), frozenset({int})
_WHOLE = "an integer of 64 bits"

#: The fields of an event, in the order in which they are written.
FIELDS = {
    "op": Field(_TEXT, f"one of {', '.join(OPS)}", "", np.uint8, frozenset(OPS)),
    "id": Field(_INTEGER, _WHOLE, 0, np.int64, frozenset({"alloc", "free"})),
    "size": Field(_INTEGER, _WHOLE, 0, np.int64, frozenset({"alloc"})),
    "alignment": Field(_INTEGER, _WHOLE, DEFAULT_ALIGNMENT, np.int64),
    "stream": Field(_INTEGER, _WHOLE, 0, np.int64),
    "space": Field(_TEXT, f"one of {', '.join(SPACES)}", SPACES[0], np.uint8),
    "label": Field(_TEXT, "text", "", np.int32),
    "time_us": Field(frozenset({int, float}), "a number", 0.0, np.float64),
    "execution": Field(_INTEGER, _WHOLE, -1, np.int64),
}
CODES = {
    "op": {text: code for code, text in enumerate(OPS)},
    "space": {text: code for code, text in enumerate(SPACES)},
}
_ABSENT_TYPE = type(ABSENT)


class RequestRows:
    """Collects events in batches and makes a request trace of them.

    ``labels`` are the texts that come first in the trace's; others follow as they appear.

    >>> rows = RequestRows()
    >>> rows.add({"op": ["alloc", "free"], "id": [7, 7], "size": [4096, ABSENT]})
    >>> list(rows.trace().events())
    [Request(size=4096, id=7, ...), Free(id=7)]
    """

    def __init__(self, labels: Sequence[str] = ("",)) -> None:
        self.rows = 0
        self._labels = {text: index for index, text in enumerate(labels)}
        # Batches in which a field is left out everywhere have no part.
        self._parts: dict[str, list[tuple[int, Column]]] = {name: [] for name in FIELDS}

    def add(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add a batch: for each field the values of its rows, `ABSENT` where one is left out.

        Raises:
            RowError: a value is missing, of the wrong type, or has more than 64 bits.
        """
        ops = columns["op"]
        nothing = [ABSENT] * len(ops)
        for name, field in FIELDS.items():
            values = columns.get(name, nothing)
            kinds = set(map(type, values))
            allowed = field.types | {_ABSENT_TYPE}
            if not kinds <= allowed:
                self._refuse(name, values, (type(each) not in allowed for each in values))
            if _ABSENT_TYPE in kinds:
                if field.needed_by:
                    absent = (each is ABSENT for each in values)
                    needed = (op in field.needed_by or op is ABSENT for op in ops)
                    self._refuse(name, values, map(and_, absent, needed))
                if len(kinds) == 1 and (name != "label" or self._labels.get("") == 0):
                    continue
                values = [field.default if each is ABSENT else each for each in values]
            self._parts[name].append((self.rows, self._column(name, values)))
        self.rows += len(ops)

    def trace(self, name: str = "") -> RequestTrace:
        """The trace of all events so far; see `request_trace`."""
        columns = {}
        for each, parts in self._parts.items():
            if parts or each in {"op", "id", "size"}:
                columns[each] = np.full(self.rows, _default(each), FIELDS[each].dtype)
            for start, part in parts:
                columns[each][start : start + len(part)] = part
        return request_trace(columns, tuple(self._labels), name)

    def _column(self, name: str, values: Sequence[Any]) -> Column:
        """The values as one column, texts as their codes."""
        dtype = FIELDS[name].dtype
        if name == "label":
            labels = self._labels
            return np.array([labels.setdefault(each, len(labels)) for each in values], dtype)
        if name in CODES:
            codes = [CODES[name].get(each, -1) for each in values]
            if -1 in codes:
                self._refuse(name, values, (each < 0 for each in codes))
            return np.array(codes, dtype)
        try:
            return np.array(values, dtype)
        except OverflowError:
            self._refuse(name, values, (abs(each) > MAX_INT64 for each in values))
            raise

    def _refuse(self, name: str, values: Sequence[Any], bad: Iterable[bool]) -> None:
        """Raise RowError for the first row that is bad, if any is."""
        row = next((at for at, each in enumerate(bad) if each), None)
        if row is not None:
            text = f"{name} {shown(values[row])}, expected {FIELDS[name].valid}"
            raise RowError("request trace", self.rows + row, text)


def request_trace(
    columns: dict[str, Column], labels: Sequence[str] = ("",), name: str = ""
) -> RequestTrace:
    """A trace from columns as files hold them.

    Columns that hold nothing but the default may be left out, and cost no memory where they are
    not. A free may repeat the size of its allocation.

    Raises:
        InputError: as of `RequestTrace`, or the size of a free is not that of its allocation.
    """
    kept = {
        each: column
        for each, column in columns.items()
        if each in {"op", "id", "size"} or (column != _default(each)).any()
    }
    frees = np.flatnonzero(kept["op"] == FREE)
    repeated = kept["size"][frees]
    if repeated.any():
        kept["size"] = kept["size"].copy()
        kept["size"][frees] = 0
    trace = RequestTrace.from_columns(**kept, labels=labels, name=name)
    if repeated.any():
        made = trace.alloc_events[trace.slot[frees]]
        wrong = np.flatnonzero((repeated != 0) & (repeated != trace.size[made]))
        if wrong.size:
            at = int(wrong[0])
            text = (
                f"free with size {repeated[at]}, expected none, 0, or the "
                f"{trace.size[made[at]]} bytes that were allocated at"
            )
            raise RowError("request trace", int(frees[at]), text, int(made[at]))
    return trace


def is_default(trace: RequestTrace, name: str) -> bool:
    """Whether a column of the trace may be left out of a file."""
    column = getattr(trace, name)
    if name == "label" and trace.labels[:1] != ("",):
        return not len(column)
    return not ((column[:1] if column.strides == (0,) else column) != _default(name)).any()


def _default(name: str) -> Any:
    """What a column holds in rows where the field is left out."""
    default = FIELDS[name].default
    return 0 if isinstance(default, str) else default
