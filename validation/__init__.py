"""Is it true: real allocators and compilers as oracles, and the tables of errors."""
