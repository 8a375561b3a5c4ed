"""Kills, full disks and signals while a Trainer runs, and what a resume makes of it."""
