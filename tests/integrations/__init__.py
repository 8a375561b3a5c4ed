"""automicro inside other trainers."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise it starts a thread
