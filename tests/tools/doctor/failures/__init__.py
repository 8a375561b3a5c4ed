"""Small programs that run out of memory for different reasons. The line at fault is marked."""
