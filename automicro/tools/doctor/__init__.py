"""Diagnosis of why memory ran out, from the files of a failure."""

from automicro.tools.doctor.diagnosis import Cause, Diagnosis, UnreadableFailureError, diagnose

__all__ = ["Cause", "Diagnosis", "UnreadableFailureError", "diagnose"]
