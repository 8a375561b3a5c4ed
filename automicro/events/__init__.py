"""Events, callbacks and the state of a run."""
