"""Why memory ran out, read off what a failure has left behind."""

from automicro.tools.doctor.causes import Cause
from automicro.tools.doctor.diagnosis import Diagnosis, UnreadableFailureError, diagnose

__all__ = ["Cause", "Diagnosis", "UnreadableFailureError", "diagnose"]
