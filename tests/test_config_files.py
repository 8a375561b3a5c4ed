"""Several files of one config, and the batch sizes that are shared out."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from automicro.cli.config.load import escape, read_config, rows_to_load, to_yaml
from automicro.cli.config.nodes import CallConfig
from automicro.cli.config.sources import merge, read_file
from automicro.errors import ConfigError
from tests.config_jobs import JOB, args_of, job, load_config


@pytest.fixture(autouse=True)
def in_a_folder_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(JOB, encoding="utf-8")


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_later_files_change_single_keys_and_arguments() -> None:
    other = write("gpu.yaml", "optimizer: {args: {momentum: 0.9}}\ndevice: cuda\nloss_fn: null\n")
    config = load_config(["base.yaml", other], ["device=cpu"])
    assert config.optimizer == CallConfig(call="torch.optim.SGD", args={"lr": 0.1, "momentum": 0.9})
    assert config.loss_fn is None
    assert config.device == "cpu"


def test_a_node_that_calls_another_class_keeps_no_arguments_of_the_earlier_one() -> None:
    other = write("adam.yaml", "optimizer: {call: torch.optim.Adam}\n")
    assert args_of(load_config(["base.yaml", other]), "optimizer") == {}
    same = write("same.yaml", "optimizer: {call: torch.optim.SGD, args: {momentum: 0.9}}\n")
    assert args_of(load_config(["base.yaml", same]), "optimizer") == {"lr": 0.1, "momentum": 0.9}
    nested = {"loss_fn": {"call": "a.B", "args": {"weight": {"call": "c.D", "args": {"x": 1}}}}}
    merged = merge(nested, {"loss_fn": {"args": {"weight": {"call": "e.F"}}}})
    assert merged["loss_fn"]["args"]["weight"] == {"call": "e.F"}


def test_merging_changes_neither_side() -> None:
    earlier = {"optimizer": {"call": "a.B", "args": {"lr": 1}}}
    later = {"optimizer": {"args": {"lr": 2}}}
    merge(earlier, later)
    assert earlier["optimizer"]["args"] == {"lr": 1}
    assert later == {"optimizer": {"args": {"lr": 2}}}


def test_now_is_one_instant() -> None:
    config = job("run_dir=runs/${now:%Y-%m-%d_%H-%M-%S-%f}")
    assert config.run_dir is not None
    assert config.run_dir.startswith("runs/2")
    assert job("run_dir=runs/${now:%Y-%m-%d_%H-%M-%S-%f}").run_dir == config.run_dir


BATCH_SIZES = [
    "train_dataloader.args.batch_size=${global_batch_size}",
    "eval_dataloader={call: a.b, args: {batch_size: '${global_batch_size}'}}",
    "optimizer.args.lr=${global_batch_size}",
    "global_batch_size=24",
]


def test_the_global_batch_size_is_shared_out_in_the_data_alone() -> None:
    write("job.yaml", JOB)
    more = ["accumulate_batches=2"]
    one = load_config("job.yaml", BATCH_SIZES)
    three = load_config("job.yaml", [*BATCH_SIZES, *more], num_devices=3)
    assert args_of(one, "train_dataloader")["batch_size"] == 24
    assert args_of(three, "train_dataloader")["batch_size"] == 4
    # Evaluation accumulates nothing.
    assert args_of(three, "eval_dataloader")["batch_size"] == 8
    # Everything else means the optimization batch.
    assert args_of(three, "optimizer") == {"lr": 24}
    assert three.global_batch_size == 24


@pytest.mark.parametrize(
    ("rows", "devices", "accumulated", "message"),
    [
        (
            100,
            8,
            1,
            "global_batch_size=100 cannot be shared by 8 devices: 4 of 100 rows would be left "
            "over; use 96 or 104",
        ),
        (
            100,
            1,
            3,
            "global_batch_size=100 cannot be shared by accumulate_batches=3: 1 of 100 rows would "
            "be left over; use 99 or 102",
        ),
        (
            100,
            2,
            3,
            "global_batch_size=100 cannot be shared by 2 devices × accumulate_batches=3: 4 of 100 "
            "rows would be left over; use 96 or 102",
        ),
        (
            3,
            8,
            1,
            "global_batch_size=3 cannot be shared by 8 devices: 3 of 3 rows would be left over; "
            "use 8",
        ),
    ],
)
def test_a_batch_that_cannot_be_shared_names_the_numbers(
    rows: int, devices: int, accumulated: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_to_load(rows, num_devices=devices, accumulate_batches=accumulated)
    assert str(caught.value) == message


def test_a_remainder_of_accumulation_is_told_of_the_config() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^the override 'global_batch_size=7': global_batch_size=7 cannot be shared by",
    ):
        job("global_batch_size=7", "accumulate_batches=2")


def test_what_is_written_reads_back_as_the_same_config() -> None:
    write("job.yaml", JOB)
    overrides = [
        *BATCH_SIZES,
        "accumulate_batches=3",
        "parameter_groups=[{params: ['*.bias'], weight_decay: 0.0}]",
        r"train_dataloader.args.dataset=['\${seed}', '1e3', 'on', 1e-5]",
        "compile={mode: default}",
        "metrics.rate={call: a.b}",
    ]
    loaded = read_config(["job.yaml"], overrides)
    assert args_of(loaded.config, "train_dataloader")["dataset"] == ["${seed}", "1e3", "on", 1e-5]
    for values in (loaded.written, loaded.everything):
        assert load_config(write("again.yaml", to_yaml(values))) == loaded.config
    # It follows when the batch size is changed, instead of contradicting it.
    again = write("again.yaml", to_yaml(loaded.written))
    assert args_of(load_config(again), "train_dataloader")["batch_size"] == 8
    more = load_config(again, ["global_batch_size=48", "accumulate_batches=1"])
    assert args_of(more, "train_dataloader")["batch_size"] == 48


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
def test_any_values_survive_being_written(values: Mapping[str, object]) -> None:
    if "???" in repr(values):
        return  # to be filled in, whoever wrote it
    Path("values.yaml").write_text(to_yaml(escape(values)), encoding="utf-8")
    again = OmegaConf.to_container(
        OmegaConf.create(read_file(Path("values.yaml"))[0]), resolve=True
    )
    assert again == values
