"""The two ways a run can fail that are not bugs of alloclab itself."""


class InputError(ValueError):
    """Bad input. One line: the file and place, what was found, what would be valid."""


class PolicyError(RuntimeError):
    """A policy broke the contract: overlap, misalignment, memory that it does not hold."""
