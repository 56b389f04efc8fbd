"""Where traces come from: capture from JAX, importers, programs and generators."""
