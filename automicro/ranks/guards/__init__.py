"""Guards for each kind of wrapper, which keep the collectives of all ranks matched."""
