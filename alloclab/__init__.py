"""alloclab: simulate, explain and teach the memory allocators behind JAX."""
