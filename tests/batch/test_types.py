"""Types that users register are cut, joined and mapped."""

import pytest
import torch

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout, balanced_sizes, num_rows, split_batch
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.batch.types import register_batch_type
from automicro.errors import BatchError
from tests.batch.structures import ROWS, SIZES, Colour, Graphs, x, y


class TestRegisteredTypes:
    @pytest.fixture(autouse=True)
    def _graphs(self):
        register_batch_type(
            Graphs,
            num_rows=lambda graphs: len(graphs.x),
            take=lambda graphs, start, stop: Graphs(graphs.x[start:stop]),
            concat=lambda parts: Graphs(torch.cat([part.x for part in parts])),
        )

    @pytest.mark.parametrize("size", SIZES)
    def test_a_registered_type_is_cut_and_joined(self, size):
        pieces = split_batch({"g": Graphs(x()), "y": y()}, size)
        assert [len(piece["g"].x) for piece in pieces] == balanced_sizes(ROWS, size)
        assert torch.equal(concat_rows(pieces)["g"].x, x())

    def test_a_subclass_is_cut_like_its_base(self):
        class Molecules(Graphs):
            pass

        assert num_rows(Molecules(x())) == ROWS

    def test_chosen_rows_are_joined(self):
        taken = BatchLayout().take_rows(Graphs(x()), [6, 1])
        assert torch.equal(taken.x, x()[[6, 1]])

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
        with pytest.raises(BatchError, match=r"take\(Leaky, 0, 4\).*gave 3 rows instead of 4"):
            split_batch(Leaky(x()), 4)

    def test_tensors_of_a_registered_value_are_mapped_in_a_copy(self):
        graphs = Graphs(x())
        mapped = map_tensors(graphs, lambda tensor: tensor + 1)
        assert torch.equal(mapped.x, x() + 1)
        assert torch.equal(graphs.x, x())
        assert [path for path, _ in tensor_leaves({"g": graphs})] == ["g.x"]

    def test_a_registered_way_to_map_is_used(self):
        class Own(Graphs):
            pass

        register_batch_type(
            Own,
            num_rows=lambda v: len(v.x),
            take=lambda v, a, b: Own(v.x[a:b]),
            map_tensors=lambda v, fn: Own(fn(v.x) * 2),
        )
        assert torch.equal(map_tensors(Own(x()), lambda t: t).x, x() * 2)

    @pytest.mark.parametrize(
        ("cls", "functions", "error", "message"),
        [
            ("Graphs", {}, TypeError, "needs a class, got 'Graphs'"),
            (dict, {}, ValueError, "dict already has a meaning"),
            (torch.Tensor, {}, ValueError, "Tensor already has a meaning"),
            (Colour, {"take": None}, TypeError, r"take=\.\.\.\) needs a function, got None"),
            (Colour, {"concat": 3}, TypeError, r"concat=\.\.\.\) needs a function, got 3"),
        ],
    )
    def test_senseless_registrations_are_refused(self, cls, functions, error, message):
        with pytest.raises(error, match=message):
            register_batch_type(cls, **{"num_rows": len, "take": len, **functions})
