"""The version, of which the build and the command line know from here."""

__version__ = "0.1.0"
