"""The message for each way to get a config wrong."""

import re
from pathlib import Path

import pytest

from automicro.errors import ConfigError
from tests.config_jobs import JOB, build_trainer, complaint, job, load_config

FORM = "write {call: dotted.path, args: {name: value}}"
GROUPS = "write mappings such as {'params': ['*.bias'], 'weight_decay': 0.0}"
DATA = "{call: torch.utils.data.DataLoader, args: {dataset: [1]}}"
CALLBACKS = "automicro.callbacks"
STOPPING = f"{CALLBACKS}.EarlyStopping"
LINES = "automicro.loggers.JSONLinesLogger"
MAPPING = "write {interval: 500ba, keep_last: 2}, {} for the defaults, or null for no checkpoints"
FIELDS = "folder, interval, keep_last, keep_best, best_metric, best_mode, asynchronous, resume"
NO_TIME = "write it like '2h30m', '45m', '90s', '1d' or '1:30:00' (hours, minutes, seconds)"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


WRONG_OVERRIDES = {
    # unknown keys, wrong types
    "optimzer.call=x": "unknown key 'optimzer' (did you mean 'optimizer'?): correct it",
    "Model=null": "unknown key 'Model' (did you mean 'model'?): correct it",
    "1=2": (
        "unknown key '1': a config has no keys of its own, and automicro config --keys lists all "
        "that there are; refer to a value where it stands, as ${model.args.width}, or take it from "
        "the environment with ${oc.env:NAME}"
    ),
    "lr=0.3": ("unknown key 'lr' (did you mean 'optimizer.args.lr'?): write optimizer.args.lr=0.3"),
    "out_features=3": (
        "unknown key 'out_features' (did you mean 'model.args.out_features'?): write "
        "model.args.out_features=3"
    ),
    "optimizer.lr=0.3": (
        "optimizer has an unknown key 'lr': arguments belong below it, as optimizer.args.lr=0.3"
    ),
    "seed=many": "seed='many' (text): expected a whole number or null",
    "seed=1.5": "seed=1.5 (a decimal number): expected a whole number or null",
    "grad_clip_norm=big": "grad_clip_norm='big' (text): expected a number or null",
    "strict_divisible=maybe": "strict_divisible='maybe' (text): expected true or false",
    "device=[cpu]": "device=['cpu'] (a list): expected text",
    "max_duration={a: 1}": (
        "max_duration={'a': 1} (a mapping): expected text such as 2ep, 500ba, 10000sp, "
        "1e6tok or 100h"
    ),
    "microbatch_size=1.5": (
        "microbatch_size=1.5 (a decimal number): expected a whole number, auto, explore, a node "
        "or null"
    ),
    "eval_microbatch_size=true": (
        "eval_microbatch_size=true: expected a whole number, auto, explore, a node or null"
    ),
    "memory_limit=1.5": (
        "memory_limit: 1.5 is neither a share of a device, such as 0.8, nor a whole number of "
        "bytes: give one of these, or text such as '24MiB'"
    ),
    # values that mean nothing
    "max_duration=2": (
        "max_duration='2' has no unit; say '2ep' (epochs), '2ba' (batches), '2sp' (samples) or "
        "'2tok' (tokens)"
    ),
    "microbatch_size=0": (
        "microbatch_size=0 (a whole number): give a whole number of at least 1, auto (found by "
        "halving), explore (the fastest number of rows) or null (the whole batch)"
    ),
    "grad_clip_norm=-1": (
        "grad_clip_norm=-1.0 must be above 0; pass a number such as 1.0, or None"
    ),
    "memory_limit=lots": (
        "memory_limit: cannot read 'lots' as an amount of memory: write a positive number and one "
        "of B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), such as "
        "'24MiB'"
    ),
    "global_batch_size=0": (
        "global_batch_size=0 has no rows: give the rows of a batch over all devices, at least 1"
    ),
    "eval_global_batch_size=0": (
        "eval_global_batch_size=0 has no rows: give the rows of a batch over all devices, at least "
        "1"
    ),
    "eval_global_batch_size=many": (
        "eval_global_batch_size='many' (text): expected a whole number or null"
    ),
    "accumulate_batches=0": "accumulate_batches=0 must be at least 1; pass an int such as 1",
    "accumulate_batches=null": "accumulate_batches=null: expected a whole number, or text such as "
    "1024sp, 1e6tok or 5h",
    "accumulate_batches=many": "accumulate_batches='many' is no size of a batch; give a number of "
    "batches, or a size such as '1024sp' (samples), '1e6tok' (tokens) or '5h' (hours of data)",
    "rehearse=worse": "rehearse='worse' is not known (did you mean 'worst'?); use one of worst",
    "scheduler_interval=epochs": (
        "scheduler_interval='epochs' is not known (did you mean 'epoch'?); use one of batch, epoch"
    ),
    "non_finite=halt": "non_finite='halt' is not known; use one of stop, skip, ignore",
    "precision=bf61": (
        "precision='bf61' is not known (did you mean 'bf16'?); use one of fp32, bf16, fp16"
    ),
    "batchnorm=wran": (
        "batchnorm='wran' is not known (did you mean 'warn'?); use one of warn, error, disable, "
        "ignore, exact"
    ),
    "loss_average=sample": (
        "loss_average='sample' is not known (did you mean 'samples'?); use one of auto, samples, "
        "tokens, none, "
        "or a function of yours from a microbatch to what its loss was divided by: "
        "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
    ),
    "loss_average={language: token}": (
        "loss_average.language='token' is not known (did you mean 'tokens'?); use one of auto, "
        "samples, tokens, none, "
        "or a function of yours from a microbatch to what its loss was divided by: "
        "{call: pkgutil.resolve_name, args: {name: my_data.count}}"
    ),
    "channels_last=sometimes": "channels_last='sometimes' (text): expected true or false",
    "deterministic=1.5": "deterministic=1.5 (a decimal number): expected true or false",
    "probe=never": "probe='never' (text): expected true or false",
    "compile=fast": "compile='fast' (text): expected true, false or a mapping",
    "compile=null": "compile=null: expected true, false or a mapping",
    "eval_interval=0ep": (
        "eval_interval='0ep' is not a whole number of epochs, batches, samples, tokens or seconds "
        "of data, at least 1; write it like '2ep', '500ba', '10000sp', '1e6tok' or '100h', or None"
    ),
    "max_duration=10xp": (
        "max_duration='10xp' is not a whole number of epochs, batches, samples, tokens or seconds "
        "of data, at least 1; write it like '2ep', '500ba', '10000sp', '1e6tok' or '100h'"
    ),
    "loss_average=3": (
        "loss_average=3 (a whole number): expected auto, samples, tokens, none, a node, or a "
        "mapping of these by name"
    ),
    "batch_layout=rows": "batch_layout='rows' (text): expected a whole number or a mapping",
    "seed=-1": "seed=-1 is outside of 0 to 4294967295; pass an int such as 0",
    "weights=none.pt": (
        "weights='none.pt': there is no such file or folder: give a path from the folder where the "
        "command is started, such as runs/first/weights.pt or runs/first/checkpoints"
    ),
    "run_dir=[a]": "run_dir=['a'] (a list): expected text or null",
    # groups of parameters
    "parameter_groups=null": "parameter_groups=null: expected a list of mappings",
    "parameter_groups=[bias]": (f"parameter_groups[0] is of type str, not a mapping: {GROUPS}"),
    "parameter_groups=[{param: bias}]": (
        "parameter_groups[0] lacks 'params' and has 'param', so nothing says whose options these "
        f"are: {GROUPS}"
    ),
    # nodes that are not well formed
    "model=torch.nn.Linear": (
        "model='torch.nn.Linear' (text) is not a mapping: write {call: torch.nn.Linear, args: "
        "{name: value}}"
    ),
    "model=null": (
        "model is missing: write at the top level model: {call: my_package.MyModel, args: "
        "{width: 64}}"
    ),
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
    "count_tokens=len": f"count_tokens='len' (text) is not a mapping: {FORM}",
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
    "train_dataloader.args.batch_size=${global_batch_size}": (
        "train_dataloader.args.batch_size refers to ${global_batch_size}, which is not set: write "
        "global_batch_size: … at the top level"
    ),
    "train_dataloader.args.batch_size=${global_batch}": (
        "train_dataloader.args.batch_size refers to ${global_batch}, which does not exist "
        "(did you mean 'global_batch_size'?): use a key of the config, from its top level"
    ),
    "run_dir=${when:%Y}": (
        "run_dir uses ${when:…}, which does not exist: use ${key}, ${oc.env:NAME} or "
        "${now:%Y-%m-%d}"
    ),
    "seed=${max_duration}": "seed='1ep' (text): expected a whole number or null",
    "model=???": "model is '???', to be filled in: write it there, or add model=VALUE",
    "model.args={in_features: '???', out_features: '???'}": (
        "model.args.in_features, model.args.out_features are '???', to be filled in: write them "
        "there, or add model.args.in_features=VALUE model.args.out_features=VALUE"
    ),
    "model.args.bias=???": (
        "model.args.bias is '???', to be filled in: write it there, or add model.args.bias=VALUE"
    ),
    "eval_dataloader=${model.args}": (
        f"eval_dataloader.in_features=8 (a whole number) is not a mapping: {FORM}"
    ),
    "model.args.in_features=${train_data.args.batch_size}": (
        "model.args.in_features refers to ${train_data.args.batch_size}, which does not exist (did "
        "you mean 'train_dataloader.args.batch_size'?): use a key of the config, from its top level"
    ),
    # overrides themselves
    "max_duration": (
        "the override 'max_duration' has no '=': write key=value, such as max_duration=2ep"
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
    "train_dataloader.args.dataset.3=1": (
        "the override 'train_dataloader.args.dataset.3=1' asks for '3' in "
        "train_dataloader.args.dataset, a list of 3: use a number from 0 to 2, or replace the list "
        "with "
        "'train_dataloader.args.dataset=[…]'"
    ),
    # callbacks, loggers, checkpoints and evaluations
    # max_time
    "max_time=2 hours": f"max_time: '2 hours' is no time: {NO_TIME}",
    "max_time=1:30:00": (
        f"max_time: '5400' is no time: it has no unit; {NO_TIME}; in YAML, put quotes around colons"
    ),
    "max_time=[2h]": ("max_time=['2h'] (a list): expected text such as 2h30m, 45m or 90s, or null"),
    # callbacks and loggers
    f"callbacks={STOPPING}": (
        f"callbacks='{STOPPING}' (text) is not a list: write [{{call: dotted.path, args: {{name: "
        "value}}], or [] for none"
    ),
    f"loggers={{call: {LINES}}}": (
        f"loggers={{'call': '{LINES}'}} (a mapping) is not a list: write [{{call: dotted.path, "
        "args: {name: value}}], or [] for none"
    ),
    f"callbacks=[{STOPPING}]": (
        f"callbacks.0='{STOPPING}' (text) is not a mapping: write {{call: {STOPPING}, args: "
        "{name: value}}"
    ),
    "loggers=[null]": f"loggers.0=null is not a mapping: {FORM}",
    f"callbacks=[{{call: {CALLBACKS}.EarlyStoping}}]": (
        f"callbacks.0.call='{CALLBACKS}.EarlyStoping': '{CALLBACKS}' exists, but has no "
        "'EarlyStoping' (did you mean 'EarlyStopping'?): correct the path"
    ),
    f"callbacks=[{{call: {STOPPING}, args: {{patient: 3}}}}]": (
        f"callbacks.0: {STOPPING} takes no argument 'patient' (did you mean 'patience'?): it takes "
        "monitor, patience, mode, min_delta"
    ),
    f"callbacks=[{{call: {STOPPING}, patience: 3}}]": (
        "callbacks.0 has an unknown key 'patience': arguments belong below it, as "
        "callbacks.0.args.patience=3"
    ),
    f"loggers=[{{call: {LINES}}}]": (
        f"loggers.0: {LINES} needs 'path': write it under loggers.0.args; it takes path"
    ),
    "callbacks=[{call: torch.nn.ReLU}]": (
        "callbacks.0.call='torch.nn.ReLU' made a ReLU, which is no Callback: name a subclass of "
        "automicro.Callback"
    ),
    "loggers=[{call: torch.nn.ReLU}]": (
        "loggers.0.call='torch.nn.ReLU' made a ReLU, which is no Logger: name a class with start, "
        "log and close, such as one of automicro.loggers"
    ),
    # checkpoints
    "checkpoint={}": (
        "checkpoint.folder is missing: give a folder such as checkpoints, or run_dir, where they "
        "lie in checkpoints then"
    ),
    "checkpoint=true": f"checkpoint=true is not a mapping: {MAPPING}",
    "checkpoint=runs/a": f"checkpoint='runs/a' (text) is not a mapping: {MAPPING}",
    "checkpoint.intervall=3ep": (
        "checkpoint has an unknown key 'intervall' (did you mean 'interval'?): use some of "
        f"{FIELDS}"
    ),
    "keep_last=3": (
        "unknown key 'keep_last' (did you mean 'checkpoint.keep_last'?): write "
        "checkpoint.keep_last=3"
    ),
    "checkpoint.keep_last=many": (
        "checkpoint.keep_last='many' (text): expected a whole number or null"
    ),
    "checkpoint.keep_best=null": "checkpoint.keep_best=null: expected a whole number",
    "checkpoint.folder=3": "checkpoint.folder=3 (a whole number): expected text",
    "checkpoint.asynchronous=sometimes": (
        "checkpoint.asynchronous='sometimes' (text): expected true or false"
    ),
    "checkpoint={folder: a, interval: 3}": (
        "checkpoint.interval='3' has no unit; say '3ep' (epochs), '3ba' (batches), '3sp' (samples) "
        "or '3tok' (tokens)"
    ),
    "checkpoint={folder: a, keep_last: 0}": (
        "checkpoint.keep_last=0 would leave nothing to go on from; give a number from 1, or None "
        "to keep all"
    ),
    "checkpoint={folder: a, best_mode: mni}": (
        "checkpoint.best_mode='mni' is not known (did you mean 'min'?); use one of min, max"
    ),
    "checkpoint={folder: a, resume: atuo}": (
        "checkpoint.resume='atuo' is not known (did you mean 'auto'?); use 'auto', 'never' or the "
        "folder of a checkpoint"
    ),
    "checkpoint.folder=${rundir}/a": (
        "checkpoint.folder refers to ${rundir}, which does not exist (did you mean 'run_dir'?): "
        "use a key of the config, from its top level"
    ),
    # evaluations
    "eval_dataloader={cal: a.b}": (
        f"eval_dataloader has an unknown key 'cal' (did you mean 'call'?): {FORM}"
    ),
    "eval_dataloader={seen: {cal: a.b}}": (
        f"eval_dataloader.seen has an unknown key 'cal' (did you mean 'call'?): {FORM}"
    ),
    "eval_dataloader={seen: a.b}": (
        "eval_dataloader.seen='a.b' (text) is not a mapping: write {call: a.b, args: {name: value}}"
    ),
    f"eval_dataloader={{seen: {DATA}, new: 3}}": (
        f"eval_dataloader.new=3 (a whole number) is not a mapping: {FORM}"
    ),
    f"eval_dataloader={{seen/all: {DATA}}}": (
        "eval_dataloader has the name 'seen/all' (text): names are text without '/', because "
        "values are "
        "logged as eval/name/loss"
    ),
    "eval_dataloader={seen: {max_batches: 3}}": (
        "eval_dataloader.seen.data is missing: write data: {call: dotted.path, args: {name: value}}"
    ),
    f"eval_dataloader={{data: {DATA}, max_batch: 3}}": (
        "eval_dataloader has an unknown key 'max_batch' (did you mean 'max_batches'?): use some of "
        "data, "
        "metrics, microbatch_size, max_batches, interval"
    ),
    f"eval_dataloader={{new: {{data: {DATA}, max_batches: all}}}}": (
        "eval_dataloader.new.max_batches='all' (text): expected a whole number or null"
    ),
    f"eval_dataloader={{new: {{data: {DATA}, max_batches: 0}}}}": (
        "eval_dataloader.new.max_batches=0 must be at least 1; pass an int such as 1"
    ),
    f"eval_dataloader={{new: {{data: {DATA}, interval: 3}}}}": (
        "eval_dataloader.new.interval='3' has no unit; say '3ep' (epochs), '3ba' (batches), '3sp' "
        "(samples) or '3tok' (tokens)"
    ),
    f"eval_dataloader={{data: {DATA}, microbatch_size: 0}}": (
        "eval_dataloader.microbatch_size=0 (a whole number): give a whole number of at least 1, "
        "auto "
        "(found by halving), explore (the fastest number of rows) or null (the whole batch)"
    ),
    f"eval_dataloader={{new: {{data: {DATA}, metrics: [a]}}}}": (
        "eval_dataloader.new.metrics=['a'] (a list) is not a mapping: write {name: {call: "
        "dotted.path, "
        "args: {…}}}, or {} for none"
    ),
    "eval_dataloader={new: {data: {call: torch.utils.data.DataLoadr}}}": (
        "eval_dataloader.new.data.call='torch.utils.data.DataLoadr': 'torch.utils.data' exists, "
        "but has "
        "no 'DataLoadr' (did you mean 'DataLoader'?): correct the path"
    ),
}


@pytest.mark.parametrize(("override", "message"), WRONG_OVERRIDES.items())
def test_a_wrong_value_is_named_with_its_key_and_the_remedy(override: str, message: str) -> None:
    # What can be told of an override alone names it, the rest is told of the config. What is made
    # has no file in its message: the command line adds it.
    source = rf"(the override {re.escape(repr(override))}: |job\.yaml(:\d+)?: |)"
    assert re.fullmatch(source + re.escape(message), complaint(override))


def test_a_mistake_names_where_it_was_brought_in() -> None:
    Path("base.yaml").write_text(JOB, encoding="utf-8")
    Path("gpu.yaml").write_text("divice: cuda\n", encoding="utf-8")
    wrong = {
        ("base.yaml", "gpu.yaml"): (
            "gpu.yaml:1: unknown key 'divice' (did you mean 'device'?): correct it"
        ),
        ("base.yaml", "sede=1"): (
            "the override 'sede=1': unknown key 'sede' (did you mean 'seed'?): correct it"
        ),
        ("base.yaml", "base.yaml", "seed=${sede}"): (
            "the override 'seed=${sede}': seed refers to ${sede}, which does not exist (did you "
            "mean 'seed'?): use a key of the config, from its top level"
        ),
    }
    for arguments, message in wrong.items():
        files = [each for each in arguments if each.endswith(".yaml")]
        overrides = [each for each in arguments if "=" in each]
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            load_config(files, overrides)


def test_an_unknown_option_of_the_compiler_is_answered_with_those_it_has() -> None:
    message = complaint("compile={mod: default}")
    assert message.startswith(
        "compile has the key 'mod', which torch.compile does not take (did you mean 'mode'?); it "
        "takes fullgraph, "
    )


def test_compiling_is_refused_where_memory_is_simulated_and_where_graphs_are_captured() -> None:
    message = complaint("compile=true", "memory_limit=1MiB", "device=cpu")
    assert message.startswith("compile=True together with memory_limit='1MiB' on the CPU: ")
    message = complaint("compile={mode: reduce-overhead}")
    assert message.startswith("compile with mode='reduce-overhead' captures CUDA graphs, ")


def test_a_device_that_is_not_there_is_refused() -> None:
    message = complaint("device=cuda:99")
    assert message.startswith("device='cuda:99' cannot be used here (")
    assert message.endswith("; pass 'auto', 'cpu' or a device that torch can see")


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "": (
            "3 mistakes:\n"
            "  job.yaml: model is missing: write at the top level model: {call: "
            "my_package.MyModel, args: {width: 64}}\n"
            "  job.yaml: train_dataloader is missing: write at the top level train_dataloader: "
            "{call: my_package.make_loader, args: {batch_size: 512}}\n"
            "  job.yaml: optimizer is missing: write at the top level optimizer: {call: "
            "torch.optim.AdamW, args: {lr: 0.001}}"
        ),
        "model: {call: a.b}\ntrain_dataloader: {call: a.b}": (
            "job.yaml: optimizer is missing: write at the top level optimizer: {call: "
            "torch.optim.AdamW, args: {lr: 0.001}}"
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
def test_a_file_that_is_no_config_says_where_and_why(text: str, message: str) -> None:
    assert complaint(text=text) == message


def test_there_is_no_place_in_an_empty_list() -> None:
    assert complaint("loggers=[]", "loggers.0.call=a.b") == (
        "the override 'loggers.0.call=a.b' asks for '0' in loggers, a list of 0: replace the list "
        "with 'loggers=[…]'"
    )


@pytest.mark.parametrize("word", ["yes", "true", "off"])
def test_true_or_false_is_refused_where_a_number_is_meant(word: str) -> None:
    said = complaint(f"optimizer.args.lr={word}")
    assert f"optimizer.args.lr is {str(word != 'off').lower()}, and" in said
    assert "takes a number there: write one; YAML reads yes, no, on and off as" in said
    build_trainer(job("optimizer.args.lr=1", "optimizer.args.nesterov=no"))


def test_arguments_that_a_callback_refuses_are_noted_with_its_key() -> None:
    config = job(f"callbacks=[{{call: {STOPPING}, args: {{patience: -3}}}}]")
    with pytest.raises(ValueError, match="patience=-3 must be at least 1") as caught:
        build_trainer(config)
    assert caught.value.__notes__ == [f"while making callbacks.0 ({STOPPING}) with patience=-3"]


def test_weights_that_are_no_checkpoint_are_refused_with_what_lies_there() -> None:
    Path("runs/first/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        build_trainer(job("weights=runs/first"))
    assert str(caught.value) == (
        "weights='runs/first': runs/first has no checkpoint in it; give the folder of one, or the "
        "folder of several; did you mean 'runs/first/checkpoints'?"
    )
