"""A pytest plugin: ``-p tests.standin.plugin`` makes the stand-in the accelerator of the whole run.

It cannot be removed again, and autograd starts its device threads at the first backward. Therefore,
its tests run separately, and the device exists before anything else.
"""

from tests.standin.device import install

install()
