"""Small programs that run out of memory, each for another reason. The line to blame is marked."""
