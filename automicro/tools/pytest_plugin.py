"""pytest plugin that checks whether a model still fits, by planning its peak without a GPU.

Call `assert_fits` in any test; a fixture has the same name. pytest loads this plugin if
``automicro[pytest]`` is installed; only tests that use it import torch.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from automicro.tools.plan.report import PlanReport

_WHOLE = sys.maxsize  # rows of a microbatch that is never cut


def assert_fits(model: Any, batch: Any, memory: Any = None, **options: Any) -> "PlanReport":
    """Fail unless a training step of this model fits in memory, in microbatches of one row.

    With ``whole=True``, the whole batch must fit in one microbatch.

    Args:
        model: as in `automicro.plan`.
        batch: as in `automicro.plan`.
        memory: as in `automicro.plan`; alternatively pass ``device="a100-80gb"``.
        options: other options of `automicro.plan`, and ``whole``.

    Raises:
        AssertionError: the model does not fit; the message is the whole report.
        TypeError, ValueError: invalid arguments; the message has the remedy.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(64, 8), torch.randn(32, 64)
        >>> def forward(model, batch):
        ...     return model(batch).square().mean()
        >>> assert_fits(model, batch, "1MiB", forward=forward).microbatch_size
        32
    """
    # pytest hides frames with this variable, so the last frame shown is the caller's assertion.
    __tracebackhide__ = True
    from automicro.tools.plan.plan import plan

    if memory is None and options.get("device", "cuda") in ("cuda", "cpu"):
        raise ValueError(
            "the amount of memory is not known. Give it, as in memory='24GiB', or name a "
            "device, as in device='a100-80gb' (automicro plan --device help lists them)"
        )
    whole: dict[str, Any] = {"microbatch_size": _WHOLE} if options.pop("whole", False) else {}
    report = plan(model, batch, memory=memory, **whole, **options)
    if not report.fits:
        raise AssertionError("the batch does not fit whole\n" * bool(whole) + str(report))
    return report


@pytest.fixture(name="assert_fits")
def give_assert_fits() -> "Callable[..., PlanReport]":
    """Return `assert_fits`."""
    return assert_fits
