"""Types registered by users are cut, joined and mapped."""

import pytest
import torch

from automicro.batch.layout import BatchLayout, split_batch
from automicro.batch.types import register_batch_type
from automicro.errors import BatchError
from tests.batch.structures import ROWS, Graphs, x, y


class TestRegisteredTypes:
    @pytest.fixture(autouse=True)
    def _graphs(self):
        register_batch_type(
            Graphs,
            num_rows=lambda graphs: len(graphs.x),
            take=lambda graphs, start, stop: Graphs(graphs.x[start:stop]),
            concat=lambda parts: Graphs(torch.cat([part.x for part in parts])),
        )

    def test_chosen_rows_need_a_way_to_join_unless_they_are_neighbours(self):
        class Plain:
            rows = ROWS

        def take(value, start, stop):
            piece = Plain()
            piece.rows = stop - start
            return piece

        register_batch_type(Plain, num_rows=lambda value: value.rows, take=take)
        assert BatchLayout().take_rows([Plain(), y()], [3, 4])[0].rows == 2
        with pytest.raises(BatchError, match=r"Rows \[6, 1\] of '0'.*concat="):
            BatchLayout().take_rows([Plain(), y()], [6, 1])

    def test_a_take_that_drops_rows_is_found_out(self):
        class Leaky(Graphs):
            pass

        register_batch_type(
            Leaky, num_rows=lambda v: len(v.x), take=lambda v, a, b: Leaky(v.x[a : b - 1])
        )
        with pytest.raises(BatchError, match=r"take\(Leaky, 0, 4\).*returned 3 rows instead of 4"):
            split_batch(Leaky(x()), 4)

    @pytest.mark.parametrize(
        ("cls", "error", "message"),
        [
            ("Graphs", TypeError, "needs a class, got 'Graphs'"),
            (dict, ValueError, "dict already has a meaning"),
            (torch.Tensor, ValueError, "Tensor already has a meaning"),
        ],
    )
    def test_senseless_registrations_are_refused(self, cls, error, message):
        with pytest.raises(error, match=message):
            register_batch_type(
                cls, num_rows=len, take=lambda value, start, stop: value[start:stop]
            )
