"""Configs: what is read from them, and the message for each way to get one wrong."""

import inspect
import re
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from pathlib import Path

import omegaconf
import pytest
import torch
from torch import nn

from automicro import MemoryBudget
from automicro.cli.batch_size import batch_size_per_device
from automicro.cli.config import TrainConfig
from automicro.cli.loading import load_config
from automicro.cli.nodes import prepare
from automicro.cli.training import build_trainer
from automicro.errors import ConfigError
from automicro.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "configs" / "digits.yaml"
DOCS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
KEYS = [each.name for each in fields(TrainConfig)]

JOB = """\
model: {call: torch.nn.Linear, args: {in_features: 8, out_features: 2}}
train_data: {call: torch.utils.data.DataLoader, args: {dataset: [1, 2, 3], batch_size: 2}}
loss: {call: torch.nn.CrossEntropyLoss}
optimizer: {call: torch.optim.SGD, args: {lr: 0.1}}
"""
FORM = "write {call: dotted.path, args: {name: value}}"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(*overrides: str, text: str = JOB) -> TrainConfig:
    Path("job.yaml").write_text(text, encoding="utf-8")
    return load_config("job.yaml", overrides)


def complaint(*overrides: str, text: str = JOB) -> str:
    with pytest.raises(ConfigError) as caught:
        build_trainer(job(*overrides, text=text))
    return str(caught.value).removeprefix("job.yaml: ")


WRONG_OVERRIDES = {
    # unknown keys, wrong types
    "optimzer.call=x": "unknown key 'optimzer' (did you mean 'optimizer'?): correct it",
    "Model=null": "unknown key 'Model' (did you mean 'model'?): correct it",
    "1=2": f"unknown key '1': use one of {', '.join(KEYS)}",
    "seed=many": "seed='many' (text): expected a whole number or null",
    "seed=1.5": "seed=1.5 (a decimal number): expected a whole number or null",
    "grad_clip_norm=big": "grad_clip_norm='big' (text): expected a number or null",
    "strict_divisible=maybe": "strict_divisible='maybe' (text): expected true or false",
    "device=[cpu]": "device=['cpu'] (a list): expected text",
    "max_duration={a: 1}": (
        "max_duration={'a': 1} (a mapping): expected text such as 2ep or 500ba"
    ),
    "microbatch_size=1.5": (
        "microbatch_size=1.5 (a decimal number): expected a whole number, auto or null"
    ),
    "eval_microbatch_size=true": (
        "eval_microbatch_size=true: expected a whole number, auto or null"
    ),
    "memory_limit=1.5": (
        "memory_limit=1.5 (a decimal number): expected text such as 24MiB, a whole number of "
        "bytes, or null"
    ),
    # values that mean nothing
    "max_duration=2": ("max_duration='2' has no unit; say '2ep' (epochs) or '2ba' (batches)"),
    "microbatch_size=0": (
        "microbatch_size=0 (a whole number): give a whole number of at least 1, auto (found by "
        "halving) or null (the whole batch)"
    ),
    "grad_clip_norm=-1": (
        "grad_clip_norm=-1.0 must be above 0; pass a number such as 1.0, or null"
    ),
    "memory_limit=lots": (
        "memory_limit: cannot read 'lots' as an amount of memory: write a positive number and one "
        "of B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), such as "
        "'24MiB'"
    ),
    "global_batch_size=0": (
        "global_batch_size=0 has no rows: give the rows of an optimization batch over all devices, "
        "at least 1"
    ),
    # nodes that are not well formed
    "model=torch.nn.Linear": f"model='torch.nn.Linear' (text) is not a mapping: {FORM}",
    "model=null": f"model=null is not a mapping: {FORM}",
    "model.cal=x": f"model has an unknown key 'cal' (did you mean 'call'?): {FORM}",
    "model={args: {}}": (
        "model.call is missing: write call: and the dotted path of a class or a function directly "
        "under model:"
    ),
    "model.call=3": (
        "model.call=3 (a whole number) is not a dotted path: write one such as torch.optim.AdamW"
    ),
    "model.args=[1]": (
        "model.args=[1] (a list) is not a mapping: write {name: value}, the names being those of "
        "the arguments of torch.nn.Linear"
    ),
    "model.args={1: 2}": (
        "model.args has the name 1 (a whole number), which is not text: use the name of an "
        "argument of torch.nn.Linear"
    ),
    "model.args.device={call: torch.device, arg: 1}": (
        f"model.args.device has an unknown key 'arg' (did you mean 'args'?): {FORM}"
    ),
    "metrics=[1]": (
        "metrics=[1] (a list) is not a mapping: write {name: {call: dotted.path, args: {…}}}, or "
        "{} for none"
    ),
    "metrics.accuracy=high": f"metrics.accuracy='high' (text) is not a mapping: {FORM}",
    # dotted paths
    "model.call=torch.nn.linear": (
        "model.call='torch.nn.linear': 'torch.nn' exists, but has no 'linear' "
        "(did you mean 'Linear'?): correct the path"
    ),
    "model.call=torch.optimm.AdamW": (
        "model.call='torch.optimm.AdamW': 'torch' exists, but has no 'optimm' "
        "(did you mean 'optim'?): correct the path"
    ),
    "model.call=torhc.nn.Linear": (
        "model.call='torhc.nn.Linear': there is no module 'torhc' (did you mean 'torch'?): install "
        "it, or put it beside the config"
    ),
    "model.call=argprase.Net": (  # no model is in the standard library
        "model.call='argprase.Net': there is no module 'argprase': install it, or put it beside "
        "the config"
    ),
    "model.call=torch/nn": (
        "model.call='torch/nn' is not a dotted path: write names joined by dots, such as "
        "torch.optim.AdamW"
    ),
    "model.call=dict": "model.call='dict' is a builtin: say builtins.dict",
    "model.call=torch.nn": (
        "model.call='torch.nn' is a module, which cannot be called: name a class or a function"
    ),
    "optimizer.call=torch.optim.adamw": (
        "optimizer.call='torch.optim.adamw' is a module, which cannot be called "
        "(did you mean 'torch.optim.adamw.AdamW'?): name a class or a function"
    ),
    "model.call=torch.pi": (
        "model.call='torch.pi' is a float, which cannot be called: name a class or a function"
    ),
    # arguments that do not fit
    "model.args.in_feature=3": (
        "model: torch.nn.Linear takes no argument 'in_feature' (did you mean 'in_features'?): it "
        "takes in_features, out_features, bias, device, dtype"
    ),
    "model.args=null": (
        "model: torch.nn.Linear needs 'in_features', 'out_features': write them under model.args; "
        "it takes in_features, out_features, bias, device, dtype"
    ),
    "scheduler.call=torch.optim.lr_scheduler.StepLR": (
        "scheduler: torch.optim.lr_scheduler.StepLR needs 'step_size': write it under "
        "scheduler.args; it takes step_size, gamma, last_epoch"
    ),
    "optimizer.args.params=[]": (
        "optimizer.args.params is not yours to give: torch.optim.SGD is handed the model's "
        "parameters there; remove it"
    ),
    "optimizer={call: gc.collect_all}": (
        "optimizer.call='gc.collect_all': 'gc' exists, but has no 'collect_all' "
        "(did you mean 'collect'?): correct the path"
    ),
    "optimizer={call: time.get_clock_info.missing}": (
        "optimizer.call='time.get_clock_info.missing': 'time.get_clock_info' exists, but has no "
        "'missing': correct the path"
    ),
    "optimizer={call: shutil.get_archive_formats}": (
        "optimizer: shutil.get_archive_formats takes no argument without a name, but is handed the "
        "model's parameters first: name a class or a function that takes them"
    ),
    # interpolations
    "train_data.args.batch_size=${global_batch_size}": (
        "train_data.args.batch_size refers to ${global_batch_size}, which is not set: write "
        "global_batch_size: … at the top level"
    ),
    "train_data.args.batch_size=${global_batch}": (
        "train_data.args.batch_size refers to ${global_batch}, which does not exist "
        "(did you mean 'global_batch_size'?): use a key of the config, from its top level"
    ),
    "model.args.bias=???": (
        "model.args.bias is '???', to be filled in: write it there, or add model.args.bias=VALUE"
    ),
    "eval_data=${model.args}": (f"eval_data has an unknown key 'in_features': {FORM}"),
    # overrides themselves
    "max_duration": (
        "the override 'max_duration' has no '=': write key=value, such as max_duration=2ep (the "
        "config file comes first)"
    ),
    "=3": (
        "the override '=3' has no key before '=', or an empty part in it: write key=value, such as "
        "optimizer.args.lr=0.001"
    ),
    "optimizer.args={lr: [": (
        "the override 'optimizer.args={lr: [' has a value that is not YAML (did not find expected "
        "node content): quote it as a whole for the shell, such as 'optimizer.args={lr: 0.1}'"
    ),
    "optimizer.args.lr.x=1": (
        "the override 'optimizer.args.lr.x=1' goes below optimizer.args.lr, which is 0.1 and holds "
        "no keys: replace it as a whole with optimizer.args.lr=VALUE"
    ),
    "train_data.args.dataset.3=1": (
        "the override 'train_data.args.dataset.3=1' asks for '3' in train_data.args.dataset, a "
        "list of 3: use a number from 0 to 2, or replace the list with "
        "'train_data.args.dataset=[…]'"
    ),
}


@pytest.mark.parametrize(("override", "message"), WRONG_OVERRIDES.items())
def test_a_wrong_value_is_named_with_its_key_and_the_remedy(override: str, message: str) -> None:
    assert complaint(override) == message


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "": (
            "model is missing: write at the top level model: {call: my_package.MyModel, args: "
            "{width: 64}}"
        ),
        "model: {call: a.b}\ntrain_data: {call: a.b}": (
            "optimizer is missing: write at the top level optimizer: {call: torch.optim.AdamW, "
            "args: {lr: 0.001}}"
        ),
        "model: [1\nseed: 2": (
            "job.yaml:2:5: not valid YAML: did not find expected ',' or ']'; correct this line or "
            "the one above it"
        ),
        "seed: 1\nseed: 2": (
            "job.yaml:2:1: not valid YAML: found duplicate key seed; correct this line or the one "
            "above it"
        ),
        "model:\n  call: ${\n": (
            "model.call: no viable alternative at input '${': correct it; an interpolation is "
            "written ${name}"
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
def test_a_file_that_is_no_config_says_where_and_why(text: str, message: str) -> None:
    assert complaint(text=text) == message


@pytest.mark.parametrize(
    ("path", "message"),
    {
        "jobs.yaml": "there is no file 'jobs.yaml': did you mean 'job.yaml'?",
        "configs/digitz.yaml": (
            "there is no file 'configs/digitz.yaml': did you mean 'configs/digits.yaml'?"
        ),
        "nothing.txt": (
            "there is no file 'nothing.txt': give the path of a YAML file, such as "
            "configs/digits.yaml, job.yaml"
        ),
        "seed=1": "there is no file 'seed=1': the config file comes first, then key=value",
        ".": ". cannot be read ([Errno 21] Is a directory: '.'): give a YAML file",
    }.items(),
)
def test_a_file_that_is_not_there_is_answered_with_those_that_are(path: str, message: str) -> None:
    Path("configs").mkdir()
    Path("configs/digits.yaml").touch()
    Path("job.yaml").touch()
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_config(path)


def test_without_any_config_nearby_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match=r"give the path of a YAML file; there is none here$"):
        load_config("job.yaml")


def test_an_error_inside_a_callable_passes_through_with_the_key_as_a_note() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate: -1") as caught:
        build_trainer(job("optimizer.args.lr=-1"))
    assert not isinstance(caught.value, ConfigError)
    assert caught.value.__notes__ == ["while making optimizer (torch.optim.SGD) with lr=-1"]


def test_an_error_while_a_module_is_imported_passes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("broken_job.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(".")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere") as caught:
        build_trainer(job("model.call=broken_job.Model"))
    assert caught.value.__notes__ == ["while importing model.call (broken_job.Model)"]


def test_mistakes_are_found_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda module: made.append(module))
    assert complaint("scheduler.call=torch.optim.lr_scheduler.Step").startswith("scheduler.call=")
    assert made == []


def test_nested_nodes_are_made_and_handed_over() -> None:
    node = {
        "call": "torch.nn.CrossEntropyLoss",
        "args": {"weight": {"call": "torch.tensor", "args": {"data": [1.0, 2.0]}}},
    }
    assert prepare(node, "loss")().weight.tolist() == [1.0, 2.0]


def test_nodes_inside_lists_and_mappings_are_made() -> None:
    args = {"things": [1, {"of": {"call": "builtins.int"}}, {"call": "fractions.Fraction"}]}
    node = {"call": "types.SimpleNamespace", "args": args}
    assert prepare(node, "model")().things == [1, {"of": 0}, 0]


def test_each_making_gives_values_of_its_own() -> None:
    make = prepare({"call": "types.SimpleNamespace", "args": {"values": [1]}}, "model")
    make().values.append(2)
    assert make().values == [1]


def test_a_function_can_be_handed_over_without_calling_it() -> None:
    node = {"call": "pkgutil.resolve_name", "args": {"name": "torch.nn.functional.mse_loss"}}
    assert prepare(node, "loss")() is nn.functional.mse_loss


@pytest.mark.parametrize(
    ("written", "read"), {"auto": "auto", "64": 64, "null": None, "'auto'": "auto"}.items()
)
def test_a_microbatch_size_is_a_number_auto_or_null(written: str, read: object) -> None:
    config = job(text=f"{JOB}microbatch_size: {written}\neval_microbatch_size: {written}\n")
    assert config.microbatch_size == read
    assert config.eval_microbatch_size == read


def test_overrides_set_nested_keys_replace_mappings_and_pick_from_lists() -> None:
    config = job(
        "optimizer.args.lr=1e-3",
        "model={call: torch.nn.Bilinear}",
        "model.args.bias=false",
        "scheduler.call=a.b",
        "metrics.loss.call=c.d",
        "train_data.args.dataset.1=7",
        "max_duration=3ep",
        "max_duration=4ep",
    )
    assert config.optimizer.args == {"lr": 0.001}
    assert (config.model.call, config.model.args) == ("torch.nn.Bilinear", {"bias": False})
    assert config.scheduler is not None
    assert config.scheduler.call == "a.b"
    assert config.metrics["loss"].call == "c.d"
    assert config.train_data.args is not None
    assert config.train_data.args["dataset"] == [1, 7, 3]
    assert config.max_duration == "4ep"


def test_null_removes_what_is_optional() -> None:
    assert job("loss=null").loss is None
    assert job("optimizer.args=null", "optimizer.args.foreach=true").optimizer.args == {
        "foreach": True
    }


def test_the_global_batch_size_stands_in_the_arguments_of_the_data() -> None:
    text = f"global_batch_size: 12\n{JOB}"
    Path("job.yaml").write_text(text, encoding="utf-8")
    overrides = [
        "train_data.args.batch_size=${global_batch_size}",
        "optimizer.args.lr=${global_batch_size}",
    ]
    one, three = (load_config("job.yaml", overrides, num_devices=n) for n in (1, 3))
    assert one.train_data.args is not None
    assert three.train_data.args is not None
    assert one.train_data.args["batch_size"] == 12
    assert three.train_data.args["batch_size"] == 4
    # Only data is shared out: everything else means the optimization batch.
    assert three.optimizer.args == {"lr": 12}
    assert three.global_batch_size == 12


def test_a_batch_that_devices_cannot_share_names_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        batch_size_per_device(100, 8)
    assert str(caught.value) == (
        "global_batch_size=100 cannot be shared by 8 devices: 4 of 100 rows would be left over; "
        "use 96 or 104"
    )
    assert batch_size_per_device(104, 8) == 13


def test_fewer_rows_than_devices_suggest_one_row_each() -> None:
    with pytest.raises(ConfigError, match=r"3 of 3 rows would be left over; use 8$"):
        batch_size_per_device(3, 8)


def test_the_seed_decides_the_initial_weights_and_nothing_before_it_does() -> None:
    def weights(seed: int) -> torch.Tensor:
        trainer = build_trainer(job(f"seed={seed}"))
        return next(trainer._modules[0].parameters()).detach().clone()

    first = weights(5)
    torch.rand(3)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)


def test_a_node_can_make_the_loss_average() -> None:
    Path("averages.py").write_text("def by_rows():\n    return lambda batch: len(batch[0])\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(".")
        build_trainer(job("loss_average={call: averages.by_rows}"))


def test_every_option_of_the_trainer_is_a_key_with_the_same_default() -> None:
    options = inspect.signature(Trainer).parameters
    renamed = {
        "train_data": "train_dataloader",
        "eval_data": "eval_dataloader",
        "loss": "loss_fn",
    }
    ours = {renamed.get(each.name, each.name): each for each in fields(TrainConfig)}
    # Further modules would have to be shared with the forward, which a config cannot say.
    assert set(options) - set(ours) == {"modules"}
    assert set(ours) - set(options) == {"global_batch_size"}
    for name, option in options.items():
        each = ours.get(name)
        if each is None or each.default in (NO_DEFAULT, omegaconf.MISSING):
            continue
        assert each.default == option.default, name


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_documented_with_its_default(key: str) -> None:
    row = re.search(rf"^\| `{key}` \| (.+?) \| .{{10,}} \|$", DOCS, re.MULTILINE)
    assert row is not None, f"docs/configuration.md has no row for {key}"
    default = {each.name: each.default for each in fields(TrainConfig)}[key]
    if default == omegaconf.MISSING:
        assert row[1] in ("required", "not set")
    elif default is not NO_DEFAULT:
        written = {None: "null", True: "true", False: "false"}
        known = default is None or isinstance(default, bool)
        assert row[1] == f"`{written[default] if known else default}`"


def test_the_documented_job_runs_with_each_documented_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = dict(re.findall(r"^```(yaml|python)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL))
    Path("my_data.py").write_text(blocks["python"], encoding="utf-8")
    monkeypatch.syspath_prepend(".")
    commands = re.findall(r"^automicro train job.yaml (.*)$", DOCS, re.MULTILINE)
    assert len(commands) >= 5
    for command in ["", *commands]:
        overrides = [each.strip("'") for each in re.findall(r"'[^']*'|\S+", command)]
        # The job as it stands runs whole, its variations for one batch.
        short = ["max_duration=1ba", "memory_limit=null"] if command else []
        config = job(*overrides, *short, "progress=false", text=blocks["yaml"])
        summary = build_trainer(config).fit()
        assert summary.steps == (1 if command else 3 * 4), command
        if not command:
            assert summary.train_ooms >= 1
            assert summary.eval_ooms >= 1


def test_the_digits_config_is_read() -> None:
    config = load_config(DIGITS)
    assert config.train_data.args == {"split": "train", "batch_size": 512, "seed": 0}
    assert config.microbatch_size == "auto"


def test_the_schedule_of_the_digits_ends_with_the_training() -> None:
    config = load_config(DIGITS)
    assert config.scheduler is not None
    assert config.max_duration == "40ep"
    assert config.scheduler.args == {"T_max": 40 * 3}


def test_the_digits_survive_running_out_of_memory_in_train_and_eval() -> None:
    summary = build_trainer(load_config(DIGITS, ["max_duration=2ba", "progress=false"])).fit()
    assert summary.steps == 2
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes <= 8 * 2**20
    last_lines = str(summary).splitlines()[-2:]
    assert last_lines[0].startswith("OOMs survived: ")
    assert "in train" in last_lines[1]


def test_the_peaks_that_explain_the_limit_are_those_measured() -> None:
    text = DIGITS.read_text(encoding="utf-8")
    train, evaluation = map(float, re.findall(r"batch peaks at ([0-9.]+) MiB", text))
    limit = re.search(r"^memory_limit: (\d+)MiB", text, re.MULTILINE)
    assert limit is not None
    assert min(train, evaluation) > float(limit[1])
    overrides = ["memory_limit=null", "max_duration=2ba", "eval_interval=null", "progress=false"]
    trainer = build_trainer(load_config(DIGITS, overrides))
    with MemoryBudget("1GiB") as budget:
        trainer.eval()
        assert budget.peak_bytes / 2**20 == pytest.approx(evaluation, abs=0.06)
        budget.reset_peak()
        trainer.fit()
        assert budget.peak_bytes / 2**20 == pytest.approx(train, abs=0.06)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_digits_end_above_97_percent() -> None:
    summary = build_trainer(load_config(DIGITS, ["progress=false"])).fit()
    assert summary.eval_metrics["accuracy"] > 0.97
    assert summary.train_ooms >= 2
    assert summary.eval_ooms >= 1
    assert summary.steps == 120
