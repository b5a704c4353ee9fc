"""`quire completion bash|zsh|fish`: a script with every command, recipe and flag of this installation.

A *place* is where the cursor stands: "" before the command, "train", "train/mlp", "sheet/verify".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from quire.cli import (
    bench,
    board,
    doctor,
    download,
    evaluate,
    explain,
    export,
    listing,
    predict,
    runs,
    sheet,
    study,
)
from quire.cli.flags import Flag, table
from quire.cli.parse import parse
from quire.cli.recipes import all_recipes
from quire.cli.train import with_processes
from quire.data.known import KNOWN


@dataclass(frozen=True)
class CompletionOptions:
    """A completion script on standard output: eval "$(quire completion bash)" in ~/.bashrc."""

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """The shell it is for."""
    debug: bool = False
    """Show the traceback of an error."""


def main(words: Sequence[str]) -> int:
    options = parse(CompletionOptions, words, prog="quire completion")
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](places()), end="")
    return 0


@dataclass(frozen=True)
class Place:
    words: tuple[str, ...] = ()
    """What may come next besides flags."""
    flags: tuple[Flag, ...] = ()

    @property
    def candidates(self) -> list[str]:
        return [*self.words, *(flag.name for flag in self.flags)]

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        return {flag.name: flag.choices for flag in self.flags if flag.choices}


def places() -> dict[str, Place]:
    """Every place and what may be typed there."""
    from quire.cli.main import COMMANDS

    found = {
        "": Place((*COMMANDS, "--help", "--version")),
        "list": _place(listing.ListOptions),
        "download": _place(download.DownloadOptions, tuple(KNOWN)),
        "train": Place(tuple(all_recipes())),
        "evaluate": _place(evaluate.EvaluateOptions),
        "predict": _place(predict.PredictOptions),
        "export": _place(export.ExportOptions),
        "doctor": _place(doctor.DoctorOptions),
        "explain": _place(explain.ExplainOptions),
        "study": _place(study.StudyOptions),
        "bench": _place(bench.BenchOptions),
        "runs": _place(runs.RunsListOptions, ("list", "show", "compare")),
        "runs/list": _place(runs.RunsListOptions),
        "runs/show": _place(runs.RunsShowOptions),
        "runs/compare": _place(runs.RunsCompareOptions),
        "report": _place(runs.ReportOptions),
        "sheet": Place(("list", "show", "verify")),
        "sheet/list": _place(sheet.SheetListOptions),
        "sheet/show": _place(sheet.SheetShowOptions),
        "sheet/verify": _place(sheet.SheetVerifyOptions),
        "board": _place(board.BoardOptions),
        "completion": Place(("bash", "zsh", "fish")),
    }
    config = Flag("--config", str)
    for name, recipe in all_recipes().items():
        plain = _place(with_processes(recipe.options))
        found[f"train/{name}"] = Place(plain.words, (*plain.flags, config))
    return found


def _place(options: type, words: tuple[str, ...] = ()) -> Place:
    flags = [flag for name, flag in table(options).items() if name.startswith("--")]
    return Place(words, (*flags, Flag("--help", bool)))


def bash(found: dict[str, Place]) -> str:
    known = " ".join(place for place in found if place)
    values = [
        f'        "{place} {flag}") words="{" ".join(choices)}" ;;'
        for place, content in found.items()
        for flag, choices in content.choices.items()
    ]
    others = [f'        "{name} "*) words="{" ".join(place.candidates)}" ;;' for name, place in found.items()]
    return "\n".join(
        [
            "_quire() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local place="" word words=""',
            '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            f'        case " {known} " in',
            '            *" ${place:+$place/}$word "*) place="${place:+$place/}$word" ;;',
            "            *) break ;;",
            "        esac",
            "    done",
            '    case "$place $previous" in',
            *values,
            *others,
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _quire quire",
            "",
        ]
    )


def zsh(found: dict[str, Place]) -> str:
    known = " ".join(place for place in found if place)
    values = [
        f'        ("{place} {flag}") candidates=({" ".join(choices)}) ;;'
        for place, content in found.items()
        for flag, choices in content.choices.items()
    ]
    others = [
        f'        ("{name} "*) candidates=({" ".join(place.candidates)}) ;;' for name, place in found.items()
    ]
    return "\n".join(
        [
            "#compdef quire",
            "_quire() {",
            '    local place="" word previous="${words[CURRENT-1]}"',
            "    local -a candidates",
            '    for word in "${(@)words[2,CURRENT-1]}"; do',
            f'        case " {known} " in',
            '            (*" ${place:+$place/}$word "*) place="${place:+$place/}$word" ;;',
            "            (*) break ;;",
            "        esac",
            "    done",
            '    case "$place $previous" in',
            *values,
            *others,
            "    esac",
            "    (( $#candidates )) && compadd -a candidates",
            '    [[ "${words[CURRENT]}" == -* ]] || _files',
            "}",
            "compdef _quire quire",
            "",
        ]
    )


def fish(found: dict[str, Place]) -> str:
    lines = [
        "function __quire_at",
        f"    set -l known {' '.join(place for place in found if place)}",
        "    set -l place",
        "    for word in (commandline -opc)[2..-1]",
        "        set -l next (string join -- / $place $word)",
        "        contains -- $next $known; or break",
        "        set place $next",
        "    end",
        '    test "$place" = "$argv[1]"',
        "end",
    ]
    for name, place in found.items():
        here = f"complete -c quire -n '__quire_at \"{name}\"'"
        if place.words:
            lines.append(f"{here} -f -a '{' '.join(place.words)}'")
        for flag in place.flags:
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r"
            lines.append(f"{here} -l {flag.name.removeprefix('--')}{'' if flag.kind is bool else value}")
    return "\n".join([*lines, ""])
