"""What the Tab key offers: commands, options, files, keys, those inside of others, and values."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automicro.cli import main
from automicro.cli.commands import COMMANDS
from automicro.cli.commands.complete import (
    SCRIPTS,
    SECTION_KEYS,
    VALUES,
    candidates,
    for_bash,
    words_of,
)
from automicro.cli.config.keys import KEYS
from automicro.cli.config.schema import HINTS, SECTIONS, keys_inside, type_in_words
from automicro.data import MODES

JOB = """\
model: {call: my_models.Wide, args: {width: 64, depths: [1, 2]}}
optimizer:
  call: torch.optim.AdamW
  args: {lr: 0.1, weight_decay: 0.2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    (tmp_path / "small.yml").write_text("optimizer: {args: {betas: [0.9, 0.99]}}", encoding="utf-8")
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    (tmp_path / "weights.pt").write_text("", encoding="utf-8")
    (tmp_path / "my jobs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "t": "train",
        "--v": "--version",
        "--debug e": "eval explore",
        "train ": "broken.yaml job.yaml|my jobs/|small.yml",
        "train j": "job.yaml",
        "train job.yaml --js": "--json",
        "train job.yaml microbatch_s": "microbatch_size=",
        "train job.yaml eval_m": "eval_microbatch_size=",
        "train job.yaml opt": "optimizer= optimizer.",
        "train job.yaml optimizer.args.": "optimizer.args.lr= optimizer.args.weight_decay=",
        "train job.yaml small.yml optimizer.args.b": "optimizer.args.betas= optimizer.args.betas.",
        "train job.yaml model.args.depths.": "model.args.depths.0= model.args.depths.1=",
        "train job.yaml checkpoint.keep": "checkpoint.keep_last= checkpoint.keep_best=",
        "train broken.yaml see": "seed=",
        "train missing.yaml see": "seed=",
        "train job.yaml precision=": "precision=fp32 precision=bf16 precision=fp16",
        "train job.yaml probe=f": "probe=false",
        "eval job.yaml weights=w": "weights=weights.pt",
        "train job.yaml run_dir=m": "run_dir=my jobs/",
        "config --keys checkp": "checkpoint",
        "cache --folder m": "my jobs/",
        "cache --older-than ": "",
        "complete ": "bash zsh fish",
        "trian ": "",
        "train job.yaml model.args.width.": "",
        "train nowhere/": "",
    }.items(),
)
def test_what_is_offered(line: str, expected: str) -> None:
    found = candidates(words_of(f"automicro {line}"), COMMANDS)
    assert " ".join(sorted(found)) == " ".join(sorted(re.split(r"(?<!my) |\|", expected)))


def test_the_words_of_each_key_are_those_that_it_takes() -> None:
    for key in HINTS:
        words = re.split(r", or |, | or ", type_in_words(key))
        expected = [each for each in words if re.fullmatch("[a-z]+[0-9]*", each)]
        expected = [each for each in expected if each not in ("text", "inherited")]
        if key in ("sampling_mode", "sampling_mode.mode"):
            expected = [*MODES, *expected]
        assert list(VALUES.get(key, ())) == expected, key
    assert VALUES.keys() <= HINTS.keys()


def test_the_keys_inside_of_others_are_all_there() -> None:
    assert {key: keys_inside(key) for key in SECTIONS} == SECTION_KEYS


def test_every_key_can_be_completed() -> None:
    found = {each.rstrip("=.") for each in candidates(["train", "job.yaml", ""], COMMANDS)}
    assert set(KEYS) <= found


@pytest.mark.parametrize(
    ("line", "words"),
    {
        "automicro": [],
        "automicro ": [""],
        "automicro train 'my jobs/a.yaml' se": ["train", "my jobs/a.yaml", "se"],
        'automicro train "my jo': ["train", "my jo"],
        "automicro train my\\ jo": ["train", "my jo"],
    }.items(),
)
def test_a_line_is_cut_as_a_shell_does(line: str, words: list[str]) -> None:
    assert words_of(line) == words


def test_bash_gets_what_follows_its_own_cut() -> None:
    assert for_bash(["run_dir=my jobs/"], "run_dir=m") == ["my\\ jobs/"]
    assert for_bash(["precision=bf16"], "precision=b") == ["bf16"]


def test_nothing_heavy_is_imported_to_complete(folder: Path) -> None:
    code = """\
import sys
from automicro.cli import main
main(["complete", "bash", "--line", "automicro train job.yaml optimizer.args.w"])
print([name for name in ("torch", "numpy", "omegaconf") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    assert done.stdout == "optimizer.args.weight_decay=\n[]\n"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]
    assert f"complete {shell} " in SCRIPTS[shell]


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "automicro tr": ["train"],
        "automicro train job.yaml microbatch_s": ["microbatch_size="],
        "automicro train job.yaml precision=b": ["bf16"],
        "automicro train m": ["my\\ jobs/"],
        "automicro train job.yaml nothing": [""],
    }.items(),
)
def test_bash_completes(line: str, expected: list[str], folder: Path) -> None:
    program = folder / "automicro"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m automicro "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    script = f"""\
eval "$("{program}" complete bash)"
COMP_LINE='{line}'
COMP_POINT=${{#COMP_LINE}}
_automicro "{program}" 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p automicro >&2
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ,
    )
    assert done.stdout.splitlines() == expected
    assert "-F _automicro automicro" in done.stderr
