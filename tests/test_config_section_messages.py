"""The message for each way to get callbacks, loggers, checkpoints and evaluations wrong."""

import re
from pathlib import Path

import pytest

from automicro.errors import ConfigError
from tests.config_jobs import build_trainer, complaint, job

FORM = "write {call: dotted.path, args: {name: value}}"
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
        "eval_dataloader.seen.data is missing: write data: beside max_batches, with a node that "
        "makes "
        "what to evaluate on ({call: dotted.path, args: {name: value}})"
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
    # What is made has no file in its message: the command line adds it.
    source = rf"(the override {re.escape(repr(override))}: |job\.yaml(:\d+)?: |)"
    assert re.fullmatch(source + re.escape(message), complaint(override))


def test_there_is_no_place_in_an_empty_list() -> None:
    assert complaint("loggers=[]", "loggers.0.call=a.b") == (
        "the override 'loggers.0.call=a.b' asks for '0' in loggers, a list of 0: replace the list "
        "with 'loggers=[…]'"
    )


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
