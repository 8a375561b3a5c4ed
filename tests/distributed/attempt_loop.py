"""Steps of several ranks as the primitive makes them: propose, agree, attempt, vote, commit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automicro.distributed import CoordinatedRanks, coordinate
from automicro.errors import PeerStoppedError
from automicro.oom import Failure, classify, release
from automicro.ranks import Proposal, Ranks, Status, rows_of_microbatches
from automicro.transaction import (
    BufferMemory,
    Buffers,
    Gradients,
    Part,
    RandomState,
    Transaction,
)
from tests.distributed.faulty_models import Faults

ROWS = 8
CPU = torch.device("cpu")


class Stepper:
    """Steps as `automicro.attempts` makes them, with halving and nothing else."""

    def __init__(
        self,
        model: nn.Module,
        faults: Faults,
        *,
        size: int = ROWS // 2,
        sizes: Sequence[int] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.faults = faults
        self.ranks = ranks or coordinate([model])
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.size = size
        self.forced = list(sizes or [])
        self.sizes: list[int] = []
        self.attempts = 0
        self.votes: list[int] = []
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def train(self, step: int, x: Tensor, y: Tensor) -> None:
        self.run(step, len(x), lambda count, rows: self.forward_backward(x, y, count, rows))
        self.gradients = [
            local(p.grad).clone() for p in self.model.parameters() if p.grad is not None
        ]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, step: int, x: Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            self.run(step, len(x), lambda count, _: self.forward(x, count), training=False)
        self.model.train()

    def run(
        self, step: int, num_rows: int, work: Callable[[int, int], None], *, training: bool = True
    ) -> None:
        before = self.count_votes()
        self.faults.step = step
        if self.forced:
            self.size = self.forced.pop(0)
        parts: list[Part] = [
            Gradients(list(self.model.parameters())),
            Buffers(BufferMemory([self.model])),
            RandomState(CPU),
        ]
        transaction = Transaction(parts)
        while True:
            self.attempts += 1
            failure = self.attempt(transaction, num_rows, work, training)
            if failure is None:
                break
            release(failure, CPU)
            status = Status.FATAL
            if classify(failure) is Failure.RETRYABLE or isinstance(failure, PeerStoppedError):
                status = Status.OUT_OF_MEMORY
            try:
                status = self.ranks.stop(failure, status)
            finally:
                transaction.roll_back()
            if status is Status.FATAL:
                raise failure
            failure = None
            self.size = max(1, self.tried // 2)  # faults go away, also at one row
        self.sizes.append(self.size)
        self.votes.append(self.count_votes() - before)

    def attempt(
        self,
        transaction: Transaction,
        num_rows: int,
        work: Callable[[int, int], None],
        training: bool,
    ) -> BaseException | None:
        agreement = self.ranks.agree(
            Proposal(
                num_rows=num_rows,
                microbatch_size=self.size,
                denominators={"": float(num_rows)},
                training=training,
            )
        )
        self.size = self.tried = agreement.microbatch_size
        try:
            self.faults.microbatch = 0
            self.faults.reach("before")
            transaction.begin()
            work(agreement.num_microbatches, agreement.num_rows)
            self.faults.reach("end")
            self.ranks.vote()
        except BaseException as error:
            return error
        transaction.commit()
        return None

    def forward_backward(self, x: Tensor, y: Tensor, count: int, total_rows: int) -> None:
        start = 0
        for index, rows in enumerate(rows_of_microbatches(len(x), count, min_rows=2)):
            self.faults.microbatch = index
            self.faults.reach("between")
            part = slice(start, start + rows) if rows else slice(0, 2)
            start += rows
            with self.ranks.microbatch(index):
                output = self.model(x[part]).to(y.dtype)
                loss = (output - y[part]).square().sum() * (1.0 if rows else 0.0)
                (loss * (self.ranks.world_size / total_rows)).backward()

    def forward(self, x: Tensor, count: int) -> None:
        outputs, start = [], 0
        for index, rows in enumerate(rows_of_microbatches(len(x), count)):
            self.faults.microbatch = index
            self.faults.reach("between")
            with self.ranks.microbatch(index):
                output = self.model(x[start : start + rows] if rows else x[:1])
            outputs += [output] * bool(rows)
            start += rows
        self.outputs = outputs

    def count_votes(self) -> int:
        return self.ranks.num_votes if isinstance(self.ranks, CoordinatedRanks) else 0


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
