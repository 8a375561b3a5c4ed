"""What each rank of a real world does with a rehearsal."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from automicro import SampleTooLargeError
from tests.ranks.trainer_jobs import whole
from tests.trainer.rehearsals import Model, loader_of, log_normal, make_trainer


def train(
    parallel: str,
    *,
    rehearse: str | None,
    limits: list[str] | None = None,
    sizes: Any = None,
    duration: str = "2ep",
    folder: str | None = None,
) -> dict[str, Any]:
    """Train on texts of varying length; what is to be compared."""
    rank = dist.get_rank()
    trainer = make_trainer(
        Model(dropout=0.3),
        loader_of(log_normal(3, 61), 4, shuffle=True),
        eval_dataloader=loader_of(log_normal(4, 19), 4),
        parallel=parallel,
        rehearse=rehearse,
        memory_limit=None if limits is None else limits[rank],
        max_duration=duration,
    )
    microbatcher = trainer._microbatcher
    if sizes is not None:
        microbatcher.load_state_dict(sizes)
    if folder is not None:
        trainer.keep_failures_in(folder)
    found: Any = None
    assert trainer._fit is not None
    rehearsal = trainer._fit.rehearsal
    if rehearsal is not None:
        run = rehearsal.run

        def noting(*arguments: Any) -> None:
            nonlocal found
            run(*arguments)
            found = microbatcher.state_dict()

        rehearsal.run = noting  # type: ignore[method-assign]
    try:
        summary = trainer.fit()
    except SampleTooLargeError as error:
        files = [] if folder is None else sorted(each.name for each in Path(folder).glob("*"))
        return {"error": str(error), "notes": error.__notes__, "files": files}
    model: nn.Module = trainer._run.model
    report = None if rehearsal is None else rehearsal.report
    return {
        "parameters": [whole(each).clone() for each in model.parameters()],
        "train_loss": summary.train_loss,
        "metrics": dict(summary.eval_metrics),
        "ooms": summary.ooms,
        "rehearsed_ooms": 0 if report is None else report.ooms,
        "batches": [] if report is None else list(report.batches),
        "random": torch.get_rng_state(),
        "sizes": found,
    }
