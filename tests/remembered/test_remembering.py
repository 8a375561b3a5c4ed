"""Remembered sizes: what they are found for, what they survive, who may write at once."""

import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from automicro import Halving, MemoryBudget, Microbatcher, SizeCacheWarning
from automicro.batch.layout import BatchLayout
from automicro.remembered.cache import RememberedSizes, SizeCache, sizes_folder
from automicro.remembered.describing import describe_run, describe_shapes
from automicro.remembered.entry import RememberedSize, RunKey

CPU = torch.device("cpu")
KEY = RunKey(
    model="CNN",
    structure="1f2e",
    parameters=34_000,
    device="CPU",
    memory_bytes=1 << 20,
    precision="fp32",
    phase="train",
    compiled=False,
    optimizer="AdamW",
    rows=64,
    shapes={"0": "float32[1, 8, 8]", "1": "int64[]"},
    world_size=1,
    automicro="0.1.0",
    torch="2.13.0",
)
SIZE = RememberedSize(microbatch_size=16, cost_per_row=64.0, peak_bytes=900_000, seconds=0.25)


@pytest.fixture
def cache(tmp_path: Path) -> SizeCache:
    return SizeCache(tmp_path / "sizes")


def path_of(cache: SizeCache, key: RunKey = KEY) -> Path:
    return Path(cache.folder / f"{key.digest}.json")


class Net(nn.Module):
    def __init__(self, *, width: int = 8, name: str = "mean", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layer = nn.Linear(width, 2, dtype=dtype)
        self.register_buffer(name, torch.zeros(2))


class Other(Net):
    """The same tensors, another class."""


def frozen() -> Net:
    net = Net()
    net.layer.bias.requires_grad_(False)
    return net


def with_gelu() -> Net:
    net = Net()
    net.act = nn.GELU()
    return net


def batch(width: int = 8, rows: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    return {"x": torch.zeros(rows, width, dtype=dtype), "y": torch.zeros(rows)}


def describe(
    module: Callable[[], nn.Module] = Net,
    *,
    more: Any = (),
    limit: str | None = None,
    **changed: Any,
) -> RunKey:
    net = module()
    optimizer = changed.pop("optimizer", torch.optim.SGD)
    arguments: dict[str, Any] = {
        "shapes": describe_shapes(changed.pop("batch", batch())),
        "rows": 6,
        "device": CPU,
        "optimizer": None if optimizer is None else optimizer(net.parameters(), lr=0.1),
    } | changed
    if limit is None:
        return describe_run([net, *more], **arguments)
    with MemoryBudget(limit):
        return describe_run([net, *more], **arguments)


CHANGES: dict[str, dict[str, Any]] = {
    "class of the model": {"module": Other},
    "shape of a parameter": {"module": lambda: Net(width=9)},
    "name of a buffer": {"module": lambda: Net(name="variance")},
    "dtype of a parameter": {"module": lambda: Net(dtype=torch.float64)},
    "whether a parameter is trained": {"module": frozen},
    "class of a submodule without tensors": {"module": with_gelu},
    "a further module": {"more": [nn.Linear(1, 1)]},
    "limit": {"limit": "1MiB"},
    "precision": {"precision": "bf16"},
    "phase": {"phase": "eval"},
    "class of the optimizer": {"optimizer": torch.optim.Adagrad},
    "no optimizer": {"optimizer": None},
    "shape of the batch": {"batch": batch(width=9)},
    "dtype of the batch": {"batch": batch(dtype=torch.float64)},
    "structure of the batch": {"batch": tuple(batch().values())},
    "rows": {"rows": 7},
    "world size": {"world_size": 2},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_key_changes_with_each_ingredient(change: dict[str, Any]) -> None:
    assert describe(**change).digest != describe().digest


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(RunKey)])
def test_every_field_of_a_key_is_in_its_digest(field: str) -> None:
    now: Any = getattr(KEY, field)
    other = {
        bool: lambda: not now,
        int: lambda: now + 1,
        str: lambda: now + "2",
        dict: lambda: {**now, "2": "float32[]"},
    }[type(now)]()
    assert dataclasses.replace(KEY, **{field: other}).digest != KEY.digest


def trained() -> Net:
    net = Net()
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    net.layer.weight.grad = torch.ones_like(net.layer.weight)
    return net.eval()


UNCHANGED: dict[str, dict[str, Any]] = {
    "values, gradients and mode": {"module": trained},
    "values of the batch": {"batch": {"x": torch.ones(6, 8), "y": torch.ones(6)}},
    "rows that only the batch shows": {"batch": batch(rows=5)},
    "order of the keys of the batch": {"batch": dict(reversed(list(batch().items())))},
}


@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED)
def test_a_key_does_not_change_with_anything_else(change: dict[str, Any]) -> None:
    assert describe(**change) == describe()


def test_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    after = describe()
    assert (after.torch, after.digest != before.digest) == ("2.99.0", True)


def test_a_compiled_model_has_a_key_of_its_own_and_its_own_name() -> None:
    def compiled_net() -> nn.Module:
        model: Any = torch.compile(Net(), backend="eager")
        return cast(nn.Module, model)

    compiled = describe(compiled_net)
    assert (compiled.model, compiled.compiled, describe().compiled) == ("Net", True, False)


def test_the_digest_is_the_same_on_every_machine_and_in_every_process() -> None:
    # Written down: a change of it makes every user's cache useless.
    assert KEY.digest == "c3856c3e581821981ec563ef594335c48ce46c3b99ea72c5ebf952855eac8d0e"


def test_a_limit_on_cuda_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    key = describe(device=torch.device("cuda", 0))
    assert (key.device, key.memory_bytes) == ("A GPU", 40 * 10**9)


def test_shapes_leave_out_the_rows_wherever_they_lie() -> None:
    given = {"x": torch.zeros(5, 4, 3), "mask": torch.ones(1, 4)}
    layout = BatchLayout({"x": 1, "mask": "shared"})
    assert describe_shapes(given, layout=layout) == {
        "*.mask": "float32[1, 4]",
        "x": "float32[5, 3]",
    }


def test_rows_that_are_not_collated_are_described_together() -> None:
    few = [{"x": torch.zeros(3)} for _ in range(4)]
    many = [{"x": torch.zeros(3)} for _ in range(40)]
    assert describe_shapes(few) == describe_shapes(many) == {"*.x": "float32[3]"}


def test_with_any_shape_dtypes_and_dimensions_stay() -> None:
    shapes = {"ids": "int64[17]", "x": "float32[1, 8, 8]", "y": "int64[]"}
    assert dict(dataclasses.replace(KEY, shapes=shapes).with_any_shape().shapes) == {
        "ids": "int64[?]",
        "x": "float32[?, ?, ?]",
        "y": "int64[]",
    }


def test_what_is_remembered_is_found_in_the_next_run(cache: SizeCache) -> None:
    cache.remember(KEY, SIZE)
    assert SizeCache(cache.folder).find(KEY) == SIZE
    assert SizeCache(cache.folder).find(dataclasses.replace(KEY, rows=65)) is None


def test_remembering_again_replaces(cache: SizeCache) -> None:
    cache.remember(KEY, SIZE)
    cache.remember(KEY, RememberedSize(microbatch_size=32))
    assert [entry.size.microbatch_size for entry in cache.entries()] == [32]
    assert len(list(cache.folder.iterdir())) == 1


def test_a_file_is_small_and_says_what_it_is_for(cache: SizeCache) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))
    key = describe(lambda: model)
    cache.remember(key, RememberedSize(microbatch_size=2))
    text = path_of(cache, key).read_text(encoding="utf-8")
    assert len(text) < 2048
    assert json.loads(text)["key"]["model"] == "Sequential"


def test_where_shapes_vary_the_size_of_varying_shapes_is_found(cache: SizeCache) -> None:
    cache.remember(KEY.with_any_shape(), SIZE)
    assert cache.find(KEY) == SIZE
    here = RememberedSize(microbatch_size=8)
    cache.remember(KEY, here)
    assert cache.find(KEY) == here


def test_a_size_larger_than_the_batch_is_refused(cache: SizeCache) -> None:
    with pytest.raises(
        ValueError, match="microbatches of 65 rows cannot be cut from a batch of 64"
    ):
        cache.remember(KEY, RememberedSize(microbatch_size=65))


@pytest.mark.parametrize(
    "wrong",
    [
        {"microbatch_size": 0},
        {"microbatch_size": True},
        {"microbatch_size": 2, "peak_bytes": -1},
        {"microbatch_size": 2, "seconds": float("nan")},
        {"microbatch_size": 2, "cost_per_row": "many"},
        {"microbatch_size": 2, "cost_per_row": 0.0},
    ],
    ids=str,
)
def test_a_size_that_nobody_can_have_measured_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r": give an? "):
        RememberedSize(**wrong)


def changed(**values: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda content: json.dumps(content | values).encode()


def inside(part: str, **values: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda content: json.dumps(content | {part: content[part] | values}).encode()


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "cut short": (
        lambda content: json.dumps(content).encode()[:100],
        "it is no JSON, or cut short",
    ),
    "empty": (lambda content: b"", "it is no JSON, or cut short"),
    "binary": (lambda content: bytes(range(256)), "it is no JSON, or cut short"),
    "deep": (lambda content: b"[" * 100_000, "it is no JSON, or cut short"),
    "large": (lambda content: b" " * (1 << 20) + b"{}", "it has 1048578 bytes"),
    "a list": (lambda content: b"[1, 2]", "it is no remembered size"),
    "foreign": (lambda content: b'{"name": "left-pad"}', "it is no remembered size"),
    "newer": (changed(format=2), "it has format 2, and this automicro reads 1"),
    "without a size": (changed(size=None), "it is damaged: "),
    "of zero rows": (inside("size", microbatch_size=0), "it is damaged: microbatch_size=0"),
    "with a field more": (inside("size", more=1), "it is damaged: "),
    "with a text for rows": (inside("key", rows="64"), "it is damaged: rows of its key is '64'"),
    "with a key of less": (changed(key={"rows": 64}), "it is damaged: its key has other fields"),
    "larger than the batch": (
        inside("size", microbatch_size=65),
        "it is damaged: microbatches of 65 of 64 rows",
    ),
    "written never": (changed(written_at="never"), "it is damaged: it was written at 'never'"),
    "of another run": (
        inside("key", rows=128),
        "its key is not the one that its name stands for",
    ),
}


@pytest.mark.parametrize(("damage", "why"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning(
    cache: SizeCache, damage: Callable[[dict[str, Any]], bytes], why: str
) -> None:
    cache.remember(KEY, SIZE)
    path = path_of(cache)
    path.write_bytes(damage(json.loads(path.read_bytes())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.find(KEY) is None
        assert cache.find(KEY) is None
        assert cache.entries() == []
    assert [each.category for each in caught] == [SizeCacheWarning]
    message = str(caught[0].message)
    assert message.startswith(f"the remembered size in {path} is not used ({why}")
    assert message.endswith("): remove it, or say automicro cache --clear")
    cache.remember(KEY, SIZE)  # the next run puts it right
    assert cache.find(KEY) == SIZE


def test_a_directory_in_place_of_a_file_is_ignored_and_not_written_over(cache: SizeCache) -> None:
    path_of(cache).mkdir(parents=True)
    with pytest.warns(SizeCacheWarning, match="it is no file"):
        assert cache.find(KEY) is None
    again = SizeCache(cache.folder)
    with pytest.warns(SizeCacheWarning, match="cannot be remembered in"):
        again.remember(KEY, SIZE)
    assert list(cache.folder.iterdir()) == [path_of(cache)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_place_of_a_file_does_not_stop_the_run(cache: SizeCache) -> None:
    cache.folder.mkdir()
    os.mkfifo(path_of(cache))
    with pytest.warns(SizeCacheWarning, match="it is no file"):
        assert cache.find(KEY) is None


def test_a_folder_that_cannot_be_made_is_one_warning_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    cache = SizeCache(tmp_path / "file" / "sizes")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.remember(KEY, SIZE)
        cache.remember(KEY, RememberedSize(microbatch_size=8))
        assert cache.find(KEY) is None
    (warning,) = caught
    assert warning.category is SizeCacheWarning
    assert str(warning.message) == (
        f"the microbatch size that was found cannot be remembered in {path_of(cache)} (Not a "
        "directory): the next run finds it anew; make the folder writable, or set "
        "AUTOMICRO_CACHE_DIR to another"
    )


@pytest.mark.parametrize("call", ["pathlib.Path.open", "os.replace"])
def test_a_full_or_unwritable_disk_leaves_the_old_size_and_no_rest(
    cache: SizeCache, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    cache.remember(KEY, SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.warns(SizeCacheWarning, match=r"\(Permission denied\)"):
            cache.remember(KEY, RememberedSize(microbatch_size=8))
    assert cache.find(KEY) == SIZE
    assert len(list(cache.folder.iterdir())) == 1


def write_often(folder: str, microbatch_size: int, times: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(times):
            SizeCache(folder).remember(KEY, RememberedSize(microbatch_size=microbatch_size))


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_two_processes_that_write_at_once_leave_a_whole_file_at_any_time(cache: SizeCache) -> None:
    cache.remember(KEY, RememberedSize(microbatch_size=8))
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_often, args=(str(cache.folder), size, 200)) for size in (8, 16)
    ]
    for writer in writers:
        writer.start()
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.is_alive() for writer in writers):
            found = cache.find(KEY)
            assert found is not None
            seen.add(found.microbatch_size)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {8, 16}
    assert list(cache.folder.iterdir()) == [path_of(cache)]


def test_clearing_while_others_clear_and_write_fails_nobody(cache: SizeCache) -> None:
    failures: list[BaseException] = []
    keys = [dataclasses.replace(KEY, rows=rows) for rows in range(64, 96)]

    def work(act: Callable[[SizeCache], object]) -> None:
        try:
            mine = SizeCache(cache.folder)
            for _ in range(10):
                act(mine)
        except BaseException as error:
            failures.append(error)

    def write(mine: SizeCache) -> None:
        for key in keys:
            mine.remember(key, SIZE)

    acts: list[Callable[[SizeCache], object]] = [write, SizeCache.clear, SizeCache.entries]
    acts.append(lambda mine: mine.clear(lambda entry: entry.key.rows > 70))
    threads = [threading.Thread(target=work, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    cache.clear()
    assert list(cache.folder.iterdir()) == []


def test_clearing_takes_damaged_files_and_old_leftovers_and_nothing_foreign(
    cache: SizeCache,
) -> None:
    cache.remember(KEY, SIZE)
    damaged = path_of(cache, dataclasses.replace(KEY, rows=65))
    foreign = cache.folder / "notes.json"
    old, new = (cache.folder / f".{KEY.digest}.{name}.tmp" for name in ("old", "new"))
    for path in (damaged, foreign, old, new):
        path.write_text("{", encoding="utf-8")
    os.utime(old, (time.time() - 7200,) * 2)
    cleared = cache.clear()
    assert set(cleared.removed) == {path_of(cache), damaged}
    assert cleared.kept == []
    assert set(cache.folder.iterdir()) == {foreign, new}


def test_clearing_some_leaves_the_others(cache: SizeCache) -> None:
    other = dataclasses.replace(KEY, model="MLP")
    cache.remember(KEY, SIZE)
    cache.remember(other, SIZE)
    assert cache.clear(lambda entry: entry.key.model == "CNN").removed == [path_of(cache)]
    assert [entry.key for entry in cache.entries()] == [other]


def test_several_damaged_files_are_told_in_one_warning(cache: SizeCache) -> None:
    cache.folder.mkdir()
    keys = [dataclasses.replace(KEY, rows=rows) for rows in (1, 2, 3)]
    first, *_ = sorted(path_of(cache, key) for key in keys)
    for key in keys:
        path_of(cache, key).write_text("{", encoding="utf-8")
    with pytest.warns(SizeCacheWarning) as caught:
        assert cache.entries() == []
    assert [str(each.message) for each in caught] == [
        f"{first} (it is no JSON, or cut short) and 2 more files cannot be read: remove them, or "
        "say automicro cache --clear"
    ]


FOLDERS: dict[str, tuple[dict[str, str], str, str]] = {
    "own": ({"AUTOMICRO_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "linux", "/a/sizes"),
    "shared": ({"XDG_CACHE_HOME": "/b"}, "linux", "/b/automicro/sizes"),
    "relative": ({"XDG_CACHE_HOME": "b"}, "linux", "/home/me/.cache/automicro/sizes"),
    "home": ({}, "linux", "/home/me/.cache/automicro/sizes"),
    "macOS": ({}, "darwin", "/home/me/Library/Caches/automicro/sizes"),
    "Windows": ({"LOCALAPPDATA": "/l"}, "win32", "/l/automicro/Cache/sizes"),
}


@pytest.mark.parametrize(("variables", "platform", "folder"), FOLDERS.values(), ids=FOLDERS)
def test_the_folder_is_where_caches_of_a_user_lie(
    variables: dict[str, str], platform: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AUTOMICRO_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert sizes_folder() == Path(folder)


def test_without_a_home_there_is_a_folder_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AUTOMICRO_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    folder = sizes_folder()
    assert isinstance(folder, Path)
    assert folder.is_absolute()


def test_tests_have_a_cache_of_their_own(own_cache: Path) -> None:
    assert SizeCache().folder == own_cache / "sizes"
    assert not own_cache.exists()


def counting(cache: SizeCache, monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunKey, int]]:
    written: list[tuple[RunKey, int]] = []
    remember = cache.remember

    def count(key: RunKey, size: RememberedSize) -> None:
        written.append((key, size.microbatch_size))
        remember(key, size)

    monkeypatch.setattr(cache, "remember", count)
    return written


def test_a_run_writes_when_its_size_changed_and_not_otherwise(
    cache: SizeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = counting(cache, monkeypatch)
    memory = RememberedSizes(cache, KEY)
    assert memory.recalled is None
    for rows, size in ((64, 32), (64, 32), (64, 16), (10, 10), (64, 16)):
        memory.settle(RememberedSize(microbatch_size=size), rows=rows)
    assert written == [(KEY, 32), (KEY, 16)]
    following = RememberedSizes(cache, KEY)
    assert following.recalled == RememberedSize(microbatch_size=16)
    following.settle(RememberedSize(microbatch_size=16), rows=64)
    assert len(written) == 2


def test_a_run_whose_shapes_vary_remembers_for_any_shape(
    cache: SizeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = counting(cache, monkeypatch)
    memory = RememberedSizes(cache, KEY)
    memory.see(KEY.shapes)
    memory.settle(SIZE, rows=64)
    memory.see({"0": "float32[1, 9, 9]", "1": "int64[]"})
    assert memory.varies
    memory.settle(SIZE, rows=64)
    assert written == [(KEY, 16), (KEY.with_any_shape(), 16)]


def train(policy: Halving, memory: Callable[[RunKey], RememberedSizes], *, limit: str) -> list[int]:
    """Train three steps, as a Microbatcher with a cache does; how many OOMs each had."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatcher = Microbatcher(
        model, loss_fn=nn.MSELoss(), optimizer=optimizer, microbatch_size=policy, probe=False
    )
    data = (torch.randn(256, 64), torch.randn(256, 1))
    ooms = []
    with MemoryBudget(limit):
        sizes = memory(
            describe_run([model], describe_shapes(data), rows=256, device=CPU, optimizer=optimizer)
        )
        if sizes.recalled is not None:
            policy.suggest(sizes.recalled.microbatch_size, sizes.recalled.cost_per_row)
        for _ in range(3):
            result = microbatcher.backward(data)
            optimizer.step()
            optimizer.zero_grad()
            ooms.append(result.ooms)
            sizes.see(describe_shapes(data))
            sizes.settle(
                RememberedSize(microbatch_size=result.microbatch_size), rows=result.num_samples
            )
    return ooms


def test_the_second_run_starts_with_the_size_of_the_first(cache: SizeCache) -> None:
    first = train(Halving(refine=False), lambda key: RememberedSizes(cache, key), limit="400KiB")
    second = train(Halving(refine=False), lambda key: RememberedSizes(cache, key), limit="400KiB")
    assert first[0] >= 2
    assert second == [0, 0, 0]


def test_a_wrong_size_is_recovered_from_and_replaced(cache: SizeCache) -> None:
    def whole_batch(key: RunKey) -> RememberedSizes:
        cache.remember(key, RememberedSize(microbatch_size=256))
        return RememberedSizes(cache, key)

    assert train(Halving(refine=False), whole_batch, limit="400KiB")[0] >= 2
    (entry,) = cache.entries()
    assert entry.size.microbatch_size < 256
    assert (
        train(Halving(refine=False), lambda key: RememberedSizes(cache, key), limit="400KiB")[0]
        == 0
    )
