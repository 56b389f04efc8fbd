"""The ideal allocator: memory never fragments. The lower bound for every other policy."""

from alloclab.policies.base import Placement, Policy, Request


class Ideal(Policy):
    """No fragmentation and no rounding: fits whenever enough bytes are free. The lower bound."""

    name = "ideal"
    ignores_limit = True

    def place(self, request: Request) -> Placement | None:
        # A region of its own for every request, at a fresh address: only the bytes count.
        start = self.reserve(request.size, request.alignment)
        return None if start is None else (start, request.size)

    def release(self, address: int, size: int) -> None:
        self.give_back(address)
