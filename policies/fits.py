"""The two textbook allocators: a heap that grows from one end, with a list of holes."""

from bisect import bisect_left, insort

from alloclab.policies.base import Placement, Policy, Request
from alloclab.policies.options import option
from alloclab.policies.units import align_up


class FirstFit(Policy):
    """The lowest hole that fits, else the heap grows. Neighbouring holes are coalesced."""

    name = "first_fit"
    ignores_limit = True
    granularity: int = option(256, "sizes are rounded up to this many bytes", is_size=True)

    def setup(self) -> None:
        self.holes: list[int] = []  # addresses, sorted
        self.size_of: dict[int, int] = {}  # address -> bytes of a hole
        self.top = 0  # end of the heap

    def place(self, request: Request) -> Placement | None:
        size = align_up(request.size, self.granularity)
        found = self.find(size, request.alignment)
        if found is None:
            found = self.grow(size, request.alignment)
            if found is None:
                return None
        hole, address = found
        end = hole + self.take(hole)
        if address > hole:
            self.put(hole, address - hole)
        if end > address + size:
            self.put(address + size, end - address - size)
        return address, size

    def find(self, size: int, alignment: int) -> tuple[int, int] | None:
        """The hole that serves the request and the address inside it."""
        for hole in self.holes:
            address = align_up(hole, alignment)
            if address + size <= hole + self.size_of[hole]:
                return hole, address
        return None

    def grow(self, size: int, alignment: int) -> tuple[int, int] | None:
        """Extend the heap so that a hole at its end fits: the hole and the address inside it."""
        last = self.holes[-1] if self.holes else self.top
        hole = last if last + self.size_of.get(last, 0) == self.top else self.top
        address = align_up(hole, alignment)
        more = address + size - self.top
        if self.extend(more) is None:
            return None
        self.put(hole, (self.take(hole) if hole < self.top else 0) + more)
        self.top += more
        return hole, address

    def release(self, address: int, size: int) -> None:
        at = bisect_left(self.holes, address)
        if at < len(self.holes) and self.holes[at] == address + size:
            size += self.take(self.holes[at])
        if at:
            before = self.holes[at - 1]
            if before + self.size_of[before] == address:
                address, size = before, size + self.take(before)
        self.put(address, size)

    def put(self, address: int, size: int) -> None:
        """Add a hole."""
        insort(self.holes, address)
        self.size_of[address] = size

    def take(self, address: int) -> int:
        """Remove a hole; its size."""
        del self.holes[bisect_left(self.holes, address)]
        return self.size_of.pop(address)


class BestFit(FirstFit):
    """The smallest hole that fits (the lowest of equals), else the heap grows."""

    name = "best_fit"

    def setup(self) -> None:
        super().setup()
        self.by_size: list[tuple[int, int]] = []  # (bytes, address), sorted

    def find(self, size: int, alignment: int) -> tuple[int, int] | None:
        for at in range(bisect_left(self.by_size, (size, 0)), len(self.by_size)):
            bytes_, hole = self.by_size[at]
            address = align_up(hole, alignment)
            if address + size <= hole + bytes_:
                return hole, address
        return None

    def put(self, address: int, size: int) -> None:
        super().put(address, size)
        insort(self.by_size, (size, address))

    def take(self, address: int) -> int:
        size = super().take(address)
        del self.by_size[bisect_left(self.by_size, (size, address))]
        return size
