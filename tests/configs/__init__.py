"""The jobs in configs/ and the modules beside them, which pytest finds as a config does."""
