"""One rank looks at a few rows while the others wait, or nobody does and says so."""

from tests.ranks.look_jobs import train
from tests.ranks.world import World


def test_the_first_rank_looks_through_ddp_without_the_others(world2: World) -> None:
    first, second = world2.run(train, "ddp", "a mean")
    assert (first["messages"], first["is"]) == ([], "checked")
    assert (second["messages"], second["is"]) == ([], "unchecked")
    assert max(first["error"], second["error"]) < 1e-12


def test_what_does_not_add_up_is_named_by_the_first_rank(world2: World) -> None:
    first, second = world2.run(train, "ddp", "a sum")
    (message,) = first["messages"]
    assert "splitting changes this batch" in message
    assert first["is"] == "wrong"
    assert second["messages"] == []


def test_a_loss_that_communicates_is_said_to_be_unchecked(world2: World) -> None:
    first, second = world2.run(train, "ddp", "gathered")
    (message,) = first["messages"]
    assert "communicates with other ranks" in message
    assert "automicro.verify" in message
    assert (first["is"], second["messages"]) == ("unchecked", [])
    assert max(first["error"], second["error"]) < 1e-12


def test_a_sharded_model_is_not_looked_at_and_says_so_once(world2: World) -> None:
    first, second = world2.run(train, "fsdp", "a mean")
    (message,) = first["messages"]
    assert "sharded parameters" in message
    assert (first["is"], second["messages"]) == ("unchecked", [])
    assert max(first["error"], second["error"]) < 1e-12
