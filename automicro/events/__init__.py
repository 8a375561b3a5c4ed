"""What happens in a run, and how others take part: events, callbacks, the state of the run."""
