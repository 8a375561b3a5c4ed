"""Diagnosis of why memory ran out, from the files of a failure."""

from automicro.tools.doctor.causes import Cause
from automicro.tools.doctor.diagnosis import Diagnosis, UnreadableFailureError, diagnose

__all__ = ["Cause", "Diagnosis", "UnreadableFailureError", "diagnose"]
