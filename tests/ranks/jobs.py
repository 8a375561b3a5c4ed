"""Jobs for the processes of a world."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import automicro.ranks.guards.ddp
import automicro.ranks.guards.fsdp
from automicro.errors import DesyncError
from automicro.ranks import heartbeat, warm_up
from automicro.ranks.coordinated import coordinate
from automicro.ranks.guards import guard
from automicro.torch_private_distributed import collectives_of
from tests.ranks.faulty_models import Fault, Faults, Net, build
from tests.ranks.steps import ROWS, Stepper, another, squared_error
from tests.ranks.wrapping import raised, whole_gradients


def batch(step: int, rank: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    rows = options.get("rows", range(ROWS, 0, -1))[rank]  # each rank has a different number of rows
    x = torch.randn(rows, 4, generator=generator)
    return x, torch.randn(rows, 2, generator=generator)


def run_steps(
    kind: str, plan: Sequence[Fault], options: dict[str, Any], like: Stepper | None = None
) -> tuple[Stepper, dict[str, Tensor]]:
    """Run three steps and an evaluation; return the stepper and the final state."""
    faults = Faults(plan)
    model = build(kind, [faults], options)
    sync: Any = {"sync": options["sync"]} if "sync" in options else {}
    forced: Any = {} if like is None else {"sizes": like.sizes, "syncs": like.syncs}
    stepper = Stepper(model, faults, **forced, **sync)
    rank = dist.get_rank() if kind != "tensor" else 0  # tensor parallelism does not shard the batch
    beside = another(model) if options.get("beside") else None
    torch.manual_seed(100 + rank)
    for step in range(options.get("steps", 3)):
        faults.depth = options.get("depths", [3] * 9)[step]
        stepper.train(step, batch(step, rank, options))
        if beside is not None:
            result = beside.evaluate(batch(50 + step, rank, options), return_outputs=True)
            stepper.outputs.append(result.outputs)
    if beside is None:
        stepper.evaluate(options.get("steps", 3), batch(99, rank, options))
    return stepper, stepper.state()


def compare(kind: str, plan: Sequence[Fault], options: dict[str, Any]) -> dict[str, Any]:
    """Compare a run with faults to a run without faults at the same sizes."""
    stepper, state = run_steps(kind, plan, options)
    clean, expected = run_steps(kind, (), options, like=stepper)
    assert clean.attempts == len(clean.sizes), "the run to compare with failed itself"
    differing = [name for name in expected if not torch.equal(state[name], expected[name])]
    return {
        "differing": differing,
        "fired": stepper.faults.fired,
        "sizes": stepper.sizes,
        "attempts": stepper.attempts,
        "syncs": stepper.syncs,
        "votes": stepper.votes,
        "buffers": {name: value for name, value in state.items() if "running" in name},
    }


def fail(kind: str, plan: Sequence[Fault], options: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a run; a process that loses a peer also ends."""
    error, text = raised(lambda: run_steps(kind, plan, options))
    return {"kind": error, "text": text}


def fail_after_loss(kind: str, plan: Sequence[Fault], options: dict[str, Any]) -> dict[str, Any]:
    """Do the same with a short wait: only the missing rank could sign in."""
    heartbeat.ROLL_CALL_SECONDS = 0.5
    return fail(kind, plan, options)


def compare_without(name: str, kind: str, plan: Sequence[Fault]) -> dict[str, Any]:
    """Like `compare`, but without one of the repairs after a failed attempt."""
    module = {
        "drop_unsharded": automicro.ranks.guards.fsdp,
        "reset_reducer": automicro.ranks.guards.ddp,
    }
    repair = getattr(module[name], name)
    setattr(module[name], name, lambda modules: None)
    try:
        return compare(kind, plan, {})
    except RuntimeError as error:
        return {"differing": [str(error)]}
    finally:
        setattr(module[name], name, repair)


def count_custom_collectives(plan: Sequence[Fault]) -> tuple[dict[str, int], int]:
    """Return how often each custom collective ran on this rank, and how often faults fired."""
    stepper, _ = run_steps("fsdp", plan, {})
    found = {}
    blocks: Any = stepper.model.blocks
    for layer, block in enumerate(blocks):
        for kind, guarded in zip(("gather", "scatter"), collectives_of(block) or (), strict=True):
            found[f"{kind} {layer}"] = guarded.inner.calls
    return found, stepper.faults.fired


def connections(kind: str, *, takes_memory: bool, alone: int | None = None) -> dict[str, Any]:
    """Return the connections made before the first forward of three steps, and after it."""
    ran: list[str] = []
    run, takes = warm_up._run, warm_up.Use.takes_device_memory

    def noting(use: warm_up.Use, whole: Tensor, part: Tensor) -> None:
        group = dist.get_process_group_ranks(use.group)
        ran.append(f"{use.kind} {use.op.name} of {len(group)}: {whole.numel()}")
        assert whole.numel() == part.numel() * len(group)
        run(use, whole, part)

    warm_up._run = noting
    if takes_memory:
        warm_up.Use.takes_device_memory = property(lambda use: True)  # type: ignore[assignment]
    try:
        model = build(kind, [Faults()], {})
        opened = guard.opened_state()
        if opened is not None:
            opened.connected.clear()  # from earlier jobs
        before: list[int] = []
        model.register_forward_pre_hook(lambda *_: before.append(len(ran)))
        first, second = (Stepper(model, Faults(), size=3) for _ in range(2))
        ranks: Any = first.microbatcher.ranks
        if dist.get_rank() == alone:
            ranks._warm_up._uses.append(ranks._warm_up._uses[0]._replace(kind="all_gather"))
        votes = ranks.num_votes
        failed = ""
        try:
            first.train(0, batch(0, dist.get_rank(), {}))
            votes = ranks.num_votes - votes
            second.train(0, batch(0, dist.get_rank(), {}))
            first.train(1, batch(1, dist.get_rank(), {}))
        except DesyncError as error:
            failed = str(error)
    finally:
        warm_up._run, warm_up.Use.takes_device_memory = run, takes  # type: ignore[method-assign]
    share = ranks.communication_share
    return {"ran": ran, "before": before, "votes": votes, "share": share, "failed": failed}


def gradients(kind: str, rows: Sequence[int], **options: Any) -> list[Tensor]:
    """Return the whole gradient of one fp64 step with so many rows per rank."""
    faults = Faults()
    model = build(kind, [faults], {"norm": False, "dtype": torch.float64})
    model.eval()  # no dropout
    stepper = Stepper(model, faults, size=3, **options)
    start = sum(rows[: dist.get_rank()])
    x, y = whole_batch(sum(rows))
    part = slice(start, start + rows[dist.get_rank()])
    result = stepper.microbatcher.backward((x[part], y[part]))
    return [*whole_gradients(model), result.loss]


def whole_batch(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(num_rows, 2, generator=generator, dtype=torch.float64)


def expected_gradients(num_rows: int) -> list[Tensor]:
    """Return the same gradient, from one process with all rows."""
    torch.manual_seed(0)
    net = Net([Faults()], norm=False).double().eval()
    x, y = whole_batch(num_rows)
    loss = squared_error(net(x), y)
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None] + [loss.detach()]


def guard_model(kind: str, options: dict[str, Any]) -> None:
    model = build(kind, [Faults()], options)
    if options.get("compiled"):
        model.compile()
    coordinate([model])


def replica_reductions(plan: Sequence[Fault]) -> tuple[set[str], int]:
    """Return the all-reduce operations of a replicated and sharded model, and the fault count.

    The operation can determine the algorithm of a communicator, so all ranks must use the same one.
    """
    found: set[str] = set()
    all_reduce = dist.all_reduce

    def noting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and kwargs.get("group") is not None:
            found.add(str(op).rpartition(".")[2])
        return all_reduce(tensor, op, *args, **kwargs)

    dist.all_reduce = noting
    try:
        stepper, _ = run_steps("hsdp", plan, {})
    finally:
        dist.all_reduce = all_reduce
    return found, stepper.faults.fired
