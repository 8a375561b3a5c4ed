"""What tests of captures share: a change that shows, comes back, and stays once committed."""

import torch

from automicro.state.capture import capture
from tests.state.picture import picture


class Box:
    def __init__(self, **values):
        vars(self).update(values)


def count(owner, name="n"):
    setattr(owner, name, getattr(owner, name, 0) + 1)


def quantized():
    return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


def undone(roots, change, see=list, *, times=3, skip=()):
    """A change shows, comes back, comes back again, and is there to stay where it is committed."""
    captured = capture(roots, skip=skip)
    shown = []
    for _ in range(times):
        assert list(captured.changed()) == []
        before = picture(see())
        for _ in range(2):
            change()
            assert picture(see()) != before, "the test's change changes nothing"
            shown = list(captured.changed())
            assert shown, "the change does not show"
            captured.put_back()
            assert picture(see()) == before
            assert list(captured.changed()) == []
        captured.put_back()
        assert picture(see()) == before
        change()
        captured = captured.again()
    return shown
