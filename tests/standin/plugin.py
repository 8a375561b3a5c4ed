"""For pytest: ``-p tests.standin.plugin`` makes the stand-in the accelerator of the whole run.

It cannot be taken away again, and autograd starts its device threads at the first backward: so
tests on it have a run of their own, and the device is there before anything else.
"""

from tests.standin.device import install

install()
