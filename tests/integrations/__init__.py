"""automicro inside the trainers of others."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # else it starts a thread
