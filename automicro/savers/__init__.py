"""Memory savers, which reduce the memory of a single row; they are switched on for an attempt."""
