"""Why memory ran out, read off what a failure has left behind."""

from automicro.doctor.causes import Cause, Remedy
from automicro.doctor.diagnosis import Diagnosis, diagnose
from automicro.doctor.snapshot import UnreadableFailureError

__all__ = ["Cause", "Diagnosis", "Remedy", "UnreadableFailureError", "diagnose"]
