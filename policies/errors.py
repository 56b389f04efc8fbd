"""The two ways a run can fail that are not bugs of alloclab itself."""


class InputError(ValueError):
    """Bad input: a file, an option or a trace. One line: the place, what was found, what is valid."""


class PolicyError(RuntimeError):
    """A policy broke the contract: overlap, misalignment, memory it does not hold. Names the rule."""
