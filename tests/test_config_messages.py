"""Error messages of wrong configs; those of single values are in tests/messages.md."""

from pathlib import Path

import pytest

from automicro.cli import main
from automicro.errors import ConfigError
from tests.config_jobs import JOB, build_trainer, config_error, job

CALLBACKS = "automicro.callbacks"
STOPPING = f"{CALLBACKS}.EarlyStopping"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    {
        ("compile={mod: default}",): ("compile={'mod': 'default'} is refused by torch: "),
        ("compile=true", "memory_limit=1MiB", "device=cpu"): (
            "compile=True does not work with memory_limit='1MiB' on the CPU: "
        ),
        ("compile={mode: reduce-overhead}",): (
            "compile with mode='reduce-overhead' captures CUDA graphs, "
        ),
        ("device=cuda:99",): "device='cuda:99' cannot be used here (",
    }.items(),
)
def test_unsupported_device_and_compile_options_are_refused(
    overrides: tuple[str, ...], beginning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    assert main(["train", "job.yaml", *overrides]) == 2
    place = f"automicro: the override {overrides[0]!r}: "
    assert capsys.readouterr().err.startswith(place + beginning)


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "": (
            "job.yaml: model is missing: write at the top level model: {call: my_package.MyModel, "
            "args: {width: 64}}"
        ),
        "model: {call: a.b}\ntrain_dataloader: {call: a.b}": (
            "job.yaml: optimizer is missing: write at the top level optimizer: {call: "
            "torch.optim.AdamW, args: {lr: 0.001}}"
        ),
        "model: [1\nseed: 2": (
            "job.yaml:2:5: not valid YAML: did not find expected ',' or ']': correct this line or "
            "the one above it; indent with spaces, and quote ${…} inside of braces"
        ),
        "seed: 1\nseed: 2": (
            "job.yaml:2:1: not valid YAML: found duplicate key seed: correct this line or the one "
            "above it; indent with spaces, and quote ${…} inside of braces"
        ),
        "model:\n  call: ${\n": (
            "job.yaml: model.call: no viable alternative at input '${': correct it; an "
            "interpolation is written ${name}"
        ),
        "- 1": (
            "job.yaml holds a list and not a mapping: write keys at its top level, such as model: "
            "{call: my_package.MyModel}"
        ),
        "train": (
            "job.yaml holds text and not a mapping: write keys at its top level, such as model: "
            "{call: my_package.MyModel}"
        ),
    }.items(),
)
def test_invalid_config_file_error_names_position_and_cause(text: str, message: str) -> None:
    assert config_error(text=text) == message


def test_weights_without_checkpoint_are_refused() -> None:
    Path("runs/first/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        build_trainer(job("weights=runs/first"))
    assert str(caught.value) == (
        "weights='runs/first': runs/first contains no checkpoint; pass the folder of one or more "
        "checkpoints"
    )
