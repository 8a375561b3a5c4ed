"""Every torch operation that communicates with other ranks is recognized."""

import torch
import torch.distributed._symmetric_memory
import torch.distributed.nn.functional
import torch.distributed.tensor

from automicro.torch_private_execution import is_collective

NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "symm_mem",
)
LOCAL = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


def operations() -> dict[str, object]:
    """Return every torch operation by name."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is not None:
            found[f"{schema.name}.{schema.overload_name}"] = overload
    return found


def test_every_operation_of_distributed_namespaces_is_known() -> None:
    every = operations()
    inside = {name: op for name, op in every.items() if name.split("::")[0] in NAMESPACES}
    assert len(inside) > 80
    unknown = {
        name.partition("::")[2].rstrip(".") for name, op in inside.items() if not is_collective(op)
    }
    assert unknown == LOCAL


def test_no_other_namespace_takes_process_group() -> None:
    others = {
        name
        for name, op in operations().items()
        if not is_collective(op)
        and any(word in str(getattr(op, "_schema", "")) for word in ("ProcessGroup", "group_name"))
    }
    assert others == set()


def test_local_operations_are_not_collectives() -> None:
    for func in (torch.ops.aten.mm.default, torch.ops.aten.sum.default, len, object()):
        assert not is_collective(func)
