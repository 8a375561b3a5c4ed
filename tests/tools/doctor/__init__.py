"""Why memory ran out: reading snapshots, and naming what was planted."""
