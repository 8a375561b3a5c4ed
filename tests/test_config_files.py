"""Configs from several files, and batch sizes divided among devices."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from automicro.cli.config.load import escape, read_config, rows_to_load, to_yaml
from automicro.cli.config.sources import merge, read_file
from automicro.errors import ConfigError
from tests.config_jobs import JOB, args_of, job, load_config


@pytest.fixture(autouse=True)
def base_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(JOB, encoding="utf-8")


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_node_with_other_call_drops_earlier_arguments() -> None:
    other = write("adam.yaml", "optimizer: {call: torch.optim.Adam}\n")
    assert args_of(load_config(["base.yaml", other]), "optimizer") == {}
    same = write("same.yaml", "optimizer: {call: torch.optim.SGD, args: {momentum: 0.9}}\n")
    assert args_of(load_config(["base.yaml", same]), "optimizer") == {"lr": 0.1, "momentum": 0.9}
    nested = {"loss_fn": {"call": "a.B", "args": {"weight": {"call": "c.D", "args": {"x": 1}}}}}
    merged = merge(nested, {"loss_fn": {"args": {"weight": {"call": "e.F"}}}})
    assert merged["loss_fn"]["args"]["weight"] == {"call": "e.F"}


def test_merge_changes_neither_input() -> None:
    earlier = {"optimizer": {"call": "a.B", "args": {"lr": 1}}}
    later = {"optimizer": {"args": {"lr": 2}}}
    merge(earlier, later)
    assert earlier["optimizer"]["args"] == {"lr": 1}
    assert later == {"optimizer": {"args": {"lr": 2}}}


def test_now_is_same_for_all_configs() -> None:
    config = job("run_dir=runs/${now:%Y-%m-%d_%H-%M-%S-%f}")
    assert config.run_dir is not None
    assert config.run_dir.startswith("runs/2")
    assert job("run_dir=runs/${now:%Y-%m-%d_%H-%M-%S-%f}").run_dir == config.run_dir


def test_written_config_keeps_references_and_resolved_values() -> None:
    overrides = ["run_dir=runs/${now:%f}", "optimizer.args.lr=${seed}", "seed=1"]
    loaded = read_config(["base.yaml"], overrides)
    assert loaded.written["run_dir"] == loaded.config.run_dir
    assert loaded.written["optimizer"]["args"] == {"lr": "${seed}"}
    assert args_of(loaded.config, "optimizer") == {"lr": 1}


@pytest.mark.parametrize(
    ("rows", "devices", "accumulated", "remedy"),
    [
        (100, 8, 1, "8 × 1: give a multiple of 8, such as 96"),
        (100, 1, 3, "1 × 3: give a multiple of 3, such as 99"),
        (100, 2, 3, "2 × 3: give a multiple of 6, such as 96"),
        (3, 8, 1, "8 × 1: give a multiple of 8, such as 8"),
        (0, 1, 1, "1 × 1: give a multiple of 1, such as 1"),
    ],
)
def test_indivisible_batch_size_error_names_numbers(
    rows: int, devices: int, accumulated: int, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_to_load(rows, num_devices=devices, accumulate_batches=accumulated)
    shares, _, use = remedy.partition(": ")
    assert str(caught.value) == (
        f"global_batch_size={rows} cannot be divided into {shares} equal shares (devices × "
        f"accumulate_batches) of at least 1 row: {use}"
    )


def test_indivisible_accumulation_error_names_override() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^the override 'global_batch_size=7': global_batch_size=7 cannot be divided",
    ):
        job("global_batch_size=7", "accumulate_batches=2")


LEAVES: st.SearchStrategy[object] = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
LEAVES |= st.floats(allow_nan=False) | st.from_regex(r"[-+.0-9eE_:xo${}\\]{1,8}", fullmatch=True)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from(["a", "b", "on"]), TREES, min_size=1))
@pytest.mark.sweep
def test_any_values_survive_write_and_read(values: Mapping[str, object]) -> None:
    if "???" in repr(values):
        return  # OmegaConf's mark of a missing value
    Path("values.yaml").write_text(to_yaml(escape(values)), encoding="utf-8")
    again = OmegaConf.to_container(
        OmegaConf.create(read_file(Path("values.yaml"))[0]), resolve=True
    )
    assert again == values
