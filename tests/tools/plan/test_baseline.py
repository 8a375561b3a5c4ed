"""A model beside what was written down of it: what grew is named, whatever it is called now."""

import dataclasses
from collections.abc import Mapping

import pytest

from automicro.tools.plan.baseline import Peaks, compare

MIB = 1 << 20


def peaks(modules: Mapping[str, tuple[str, float]], *, peak: float = 512, **kinds: float) -> Peaks:
    """Of modules by name: class, and MiB of activations."""
    return Peaks(
        peak_bytes=int(peak * MIB),
        kinds={kind: int(held * MIB) for kind, held in kinds.items()},
        modules={name: {"activations": int(held * MIB)} for name, (_, held) in modules.items()},
        classes={name: kind for name, (kind, _) in modules.items()},
        conditions="",
    )


BLOCK = {
    "h.*": ("Block", 8.0),
    "h.*.attn": ("Attention", 96.0),
    "h.*.mlp.act": ("GELU", 64.0),
    "h.*.mlp.up": ("Linear", 16.0),
    "head": ("Linear", 4.0),
}


def named(
    old: str, new: str, modules: Mapping[str, tuple[str, float]]
) -> dict[str, tuple[str, float]]:
    return {name.replace(old, new): held for name, held in modules.items()}


@pytest.mark.parametrize(
    ("after", "renamed"),
    [
        (named("mlp", "ffn", BLOCK), {"h.*.mlp.act -> h.*.ffn.act", "h.*.mlp.up -> h.*.ffn.up"}),
        (
            named("mlp.", "mlp.inner.", BLOCK),
            {"h.*.mlp.act -> h.*.mlp.inner.act", "h.*.mlp.up -> h.*.mlp.inner.up"},
        ),
        (named(".mlp", "", BLOCK), {"h.*.mlp.act -> h.*.act", "h.*.mlp.up -> h.*.up"}),
        ({f"module.{name}": held for name, held in BLOCK.items()}, {
            f"{name} -> module.{name}" for name in BLOCK
        }),
    ],
    ids=["renamed", "wrapped", "unwrapped", "all in a wrapper"],
)  # fmt: skip
def test_modules_with_another_name_have_not_grown(
    after: Mapping[str, tuple[str, float]], renamed: set[str]
) -> None:
    found = compare(peaks(BLOCK), peaks(after), 0.05)
    assert not found.grown
    assert not found.shrunk
    assert set(found.renamed) == renamed


def test_the_culprit_is_not_buried_by_a_wrapper() -> None:
    wrapped = named("mlp.", "mlp.inner.", BLOCK) | {"h.*.mlp": ("Keeping", 16.0)}
    found = compare(peaks(BLOCK), peaks(wrapped, peak=528), 0.05)
    assert [str(each) for each in found.grown] == [
        "activations of h.*.mlp (new): 0 bytes -> 16.00 MiB"
    ]


def test_what_grew_under_a_new_name_is_told_with_the_old_one() -> None:
    wider = named("mlp", "ffn", BLOCK) | {"h.*.ffn.act": ("GELU", 128.0)}
    found = compare(peaks(BLOCK), peaks(wider, peak=576), 0.05)
    assert str(found).splitlines() == [
        "  peak: 512.00 MiB -> 576.00 MiB",
        "  activations of h.*.ffn.act (renamed? it was h.*.mlp.act): 64.00 MiB -> 128.00 MiB",
        "renamed?",
        "  h.*.mlp.act -> h.*.ffn.act",
        "  h.*.mlp.up -> h.*.ffn.up",
    ]


def test_parts_that_were_split_or_joined_are_added_up() -> None:
    whole = {"attn.qkv": ("Linear", 48.0)}
    parts = {f"attn.{each}": ("Linear", 16.0) for each in "qkv"}
    for before, after in ((whole, parts), (parts, whole)):
        found = compare(peaks(before), peaks(after), 0.05)
        assert not found.grown
        assert len(found.renamed) == 1
    twice = {"attn.qkv": ("Linear", 96.0)}
    (grown,) = compare(peaks(parts), peaks(twice), 0.05).grown
    assert (grown.before, grown.now) == (48 * MIB, 96 * MIB)


def test_a_number_that_another_module_took_over_is_no_name() -> None:
    """As in an nn.Sequential in which something was wrapped, or put in between."""
    before = {"0": ("Linear", 32.0), "1": ("ReLU", 64.0), "2": ("Linear", 16.0)}
    wrapped = {"0.*": ("Linear, ReLU", 96.0), "1": ("Linear", 16.0)}
    longer = {"0": ("Norm", 8.0), "1": ("Linear", 32.0), "2": ("ReLU", 64.0), "3": ("Linear", 16.0)}
    assert not compare(peaks(before), peaks(wrapped), 0.05).grown
    (grown,) = compare(peaks(before), peaks(longer), 0.05).grown
    assert grown.part == "activations of 0 (new)"
    replaced = {**before, "1": ("Mish", 256.0)}
    (grown,) = compare(peaks(before), peaks(replaced), 0.05).grown
    assert str(grown) == "activations of 1: 64.00 MiB -> 256.00 MiB"


def test_a_new_module_is_no_other_one_renamed() -> None:
    found = compare(peaks(BLOCK), peaks({**BLOCK, "extra": ("Linear", 16.0)}), 0.05)
    assert [each.part for each in found.grown] == ["activations of extra (new)"]
    assert not found.renamed
    other = {name: held for name, held in BLOCK.items() if name != "head"} | {"pool": ("Pool", 90)}
    found = compare(peaks(BLOCK), peaks(other), 0.05)
    assert [each.part for each in found.grown] == ["activations of pool (new)"]
    assert [each.part for each in found.shrunk] == ["activations of head (gone)"]


def test_what_shrank_and_the_peak_are_told_beside_what_grew() -> None:
    after = BLOCK | {"h.*.attn": ("Attention", 32.0), "head": ("Linear", 12.0)}
    assert str(compare(peaks(BLOCK), peaks(after, peak=456), 0.05)).splitlines() == [
        "  peak: 512.00 MiB -> 456.00 MiB",
        "  activations of head: 4.00 MiB -> 12.00 MiB",
        "what shrank:",
        "  activations of h.*.attn: 96.00 MiB -> 32.00 MiB",
    ]
    again = peaks(BLOCK, peak=512.001)
    assert "peak: 512.00 MiB, as before" in str(compare(peaks(BLOCK), again, 0.05))


def test_other_conditions_are_told_beside_what_grew() -> None:
    before = dataclasses.replace(peaks(BLOCK), conditions="8 of 8 rows, torch 2.12.0")
    after = BLOCK | {"head": ("Linear", 12.0)}
    now = dataclasses.replace(peaks(after), conditions="8 of 8 rows, torch 2.13.0")
    assert str(compare(before, now, 0.05)).splitlines()[-1] == (
        "planned for 8 of 8 rows, torch 2.13.0; the file for 8 of 8 rows, torch 2.12.0"
    )


def test_long_lists_are_cut_and_counted() -> None:
    many = {f"layer{number}.fc": ("Linear", 8.0) for number in range(20)}
    twice = {name: (kind, 2 * held) for name, (kind, held) in many.items()}
    assert str(compare(peaks(many), peaks(twice), 0.05)).splitlines()[-1] == "  and 8 more"


def test_a_share_of_nothing_allows_no_byte() -> None:
    after = peaks(BLOCK | {"head": ("Linear", 4.001)})
    assert not compare(peaks(BLOCK), after, 0.05).grown
    assert compare(peaks(BLOCK), after, 0.0).grown


def test_entries_are_read_as_they_were_written() -> None:
    before = peaks(BLOCK, parameters=32.0)
    assert Peaks.read(before.entry()) == before
    with pytest.raises((KeyError, TypeError, ValueError)):
        Peaks.read({"parts": {}})
