"""Which leaf of the tree loses its tail next, and what guards whoever decides it."""
