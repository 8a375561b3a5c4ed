"""What the command ``automicro complete`` is called and takes."""

import argparse

from automicro.cli.subcommand import Subcommand

DESCRIPTION = """\
Print what lets a shell complete command lines of automicro with the Tab key:
commands, options, configs, keys of a config (those inside of others, too) and the
words that they take. Add the line of your shell to the file that it reads first.
"""

# What ends so is gone on with, so no space follows it.
SCRIPTS = {
    "bash": """\
_automicro() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($("$1" complete bash --line "$line" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _automicro automicro
""",
    "zsh": """\
_automicro() {
    local -a found
    found=("${(@f)$("${words[1]}" complete zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- "${(@M)found:#*[=/.]}"
    compadd -- "${(@)found:#*[=/.]}"
}
compdef _automicro automicro
""",
    "fish": """\
function __automicro
    set -l words (commandline -opc) (commandline -ct)
    $words[1] complete fish --words $words[2..] 2>/dev/null
end
complete -c automicro -f -a '(__automicro)'
""",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), help="of which shell")
    # How the scripts ask: bash cuts words in pieces at =, so it gives the line.
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.line is None and arguments.words is None:
        print(SCRIPTS[arguments.shell], end="")
        return 0
    from automicro.cli.commands import COMMANDS
    from automicro.cli.completing import candidates, for_bash, words_of

    words = words_of(arguments.line) if arguments.words is None else arguments.words
    found = candidates(words, COMMANDS)
    if arguments.line is not None:
        found = for_bash(found, words[-1] if words else "")
    print("\n".join(found))
    return 0


COMPLETE = Subcommand(
    name="complete",
    brief="print what lets a shell complete command lines",
    description=DESCRIPTION,
    examples=(
        'eval "$(automicro complete bash)"     # in ~/.bashrc',
        'eval "$(automicro complete zsh)"      # in ~/.zshrc, after compinit',
        "automicro complete fish | source      # in ~/.config/fish/config.fish",
    ),
    exit_codes={0: "printed"},
    add_arguments=_add_arguments,
    run=_run,
)
