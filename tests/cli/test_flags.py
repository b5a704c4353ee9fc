"""Options from words and files: what fits, what does not, and what the message says."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.flags import check_words, given, table
from quire.cli.parse import parse_with_config
from quire.errors import InputError
from quire.options import Schedule
from tests.cli.conftest import TinyOptions


def options_of(*words: str, recipe: str = "tiny") -> TinyOptions:
    return parse_with_config(TinyOptions, words, prog="quire train tiny", recipe=recipe)


def error_of(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        options_of(*words)
    return str(caught.value)


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "options.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_nested_flags_become_nested_options() -> None:
    made = options_of("--optim.lr", "0.1", "--optim.schedule.name", "cosine", "--model.hidden", "32", "16")
    assert made.optim.lr == 0.1
    assert made.optim.schedule == Schedule(name="cosine")
    assert made.model.hidden == (32, 16)
    assert type(made) is TinyOptions


def test_a_list_that_may_be_left_out_takes_any_number_of_words(tmp_path: Path) -> None:
    assert options_of("--model.sizes", "3", "4").model.sizes == (3, 4)
    assert options_of("--model.sizes").model.sizes == ()
    assert options_of().model.sizes is None
    assert options_of("--config", write(tmp_path, "[model]\nsizes = [5]")).model.sizes == (5,)
    assert "--model.sizes is '3 x'\n  expected: a list, each a whole number" in error_of(
        "--model.sizes", "3", "x"
    )


def test_defaults_are_the_dataclass() -> None:
    assert options_of() == TinyOptions()


def test_a_boolean_has_two_flags() -> None:
    assert options_of("--overwrite").overwrite
    assert not options_of("--no-overwrite").overwrite
    assert not options_of("--optim.no-decay-biases").optim.decay_biases


def test_underscores_and_equals_signs_are_accepted() -> None:
    made = options_of("--optim.weight_decay=0.5", "--train.batch-size", "7")
    assert (made.optim.weight_decay, made.train.batch_size) == (0.5, 7)


def test_a_negative_value_is_no_flag() -> None:
    assert options_of("--data", "a.csv", "--target", "-1").target == "-1"


def test_every_recipe_has_the_common_options() -> None:
    names = set(table(TinyOptions))
    assert {"--data", "--target", "--out", "--resume", "--overwrite", "--seed", "--device"} <= names
    assert {"--epochs", "--steps", "--json", "--quiet", "--debug"} <= names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lrr", "0.1"], "unknown option '--optim.lrr'\n  fix: did you mean '--optim.lr'?"),
        (["-x"], "unknown option '-x'\n  fix: see quire train tiny --help"),
        (["--optim.lr", "abc"], "--optim.lr is 'abc'\n  expected: a number\n"),
        (["--seed", "1.5"], "--seed is '1.5'\n  expected: a whole number\n"),
        (["--model.hidden", "8", "x"], "--model.hidden is '8 x'\n  expected: a list, each a whole number\n"),
        (["--optim.name", "adm"], "--optim.name is 'adm'\n  expected: one of adam, sgd\n  fix: did you"),
        (["--optim.lr"], "--optim.lr without a value\n  expected: a number"),
        (["--optim.lr", "--seed", "1"], "--optim.lr without a value\n  expected: a number"),
        (["--data", ""], "--data is ''\n  expected: a path"),
        (["--overwrite=yes"], "--overwrite=yes: --overwrite takes no value"),
        (["extra"], "unexpected word 'extra'\n  expected: an option such as --extra"),
        (["house.csv"], "unexpected word 'house.csv'\n  expected: no further word\n  fix: for a file of"),
        # Raised by the dataclasses themselves, some inside tyro:
        (["--optim.lr", "-1"], "--optim.lr is -1.0\n  expected: a number > 0\n  fix: set --optim.lr to"),
        (["--model.dropout", "1"], "--model.dropout is 1.0\n  expected: a number in [0, 1)"),
        (["--epochs", "1", "--steps", "2"], "both --epochs and --steps\n  expected: one of them"),
        (["--target", "y"], "--target y without --data"),
        (["--device", "gpu"], "--device is 'gpu'\n  expected: auto, cpu, cuda or cuda:N"),
    ],
)  # fmt: skip
def test_mistakes_have_one_clean_message(words: list[str], message: str) -> None:
    text = error_of(*words)
    assert text.startswith(message)
    assert "╭" not in text
    assert "Error parsing" not in text


def test_a_file_gives_options_and_flags_win(tmp_path: Path) -> None:
    file = write(tmp_path, 'epochs = 3\n[optim]\nlr = 1\nname = "sgd"\n[optim.schedule]\nwarmup = 5\n')
    made = options_of("--config", file, "--optim.lr", "0.25")
    assert (made.epochs, made.optim.name, made.optim.lr, made.optim.schedule.warmup) == (3, "sgd", 0.25, 5)
    assert isinstance(options_of(f"--config={file}").optim.lr, float)


def test_a_file_may_hold_one_half_of_what_belongs_together(tmp_path: Path) -> None:
    file = write(tmp_path, 'target = "price"\n')
    made = options_of("--config", file, "--data", "house.csv")
    assert (made.target, made.data) == ("price", Path("house.csv"))


def test_lists_and_paths_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'data = "a.csv"\n[model]\nhidden = [4, 5]\n[table]\ndrop = ["id"]\n')
    made = options_of("--config", file)
    assert (made.data, made.model.hidden, made.table.drop) == (Path("a.csv"), (4, 5), ("id",))


RUN = 'format = 1\nrecipe = "tiny"\ncommand = "quire train tiny"\n[versions]\nquire = "0"\n'


def test_the_config_of_a_run_repeats_it_elsewhere(tmp_path: Path) -> None:
    options = '[options]\nseed = 4\nout = "runs/x"\noverwrite = true\n[options.optim]\nlr = 0.5\n'
    file = write(tmp_path, RUN + options)
    made = options_of("--config", file)
    assert (made.seed, made.optim.lr, made.out, made.overwrite) == (4, 0.5, None, False)


def test_the_config_of_another_recipe_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, RUN + "[options]\nseed = 4\n")
    with pytest.raises(InputError, match="of the recipe 'tiny', not 'other'") as caught:
        options_of("--config", file, recipe="other")
    assert caught.value.fix == "quire train tiny …"


def test_a_resumed_run_keeps_its_options(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(RUN + "[options]\nepochs = 9\n[options.optim]\nlr = 0.5\n")
    made = options_of("--resume", str(tmp_path))
    assert (made.resume, made.epochs, made.optim.lr) == (tmp_path, 9, 0.5)
    longer = options_of("--resume", str(tmp_path), "--steps", "7")
    assert (longer.epochs, longer.steps) == (None, 7)


def test_resuming_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.toml").write_text(RUN)
    assert f"did you mean '{tmp_path / 'one'}'?" in error_of("--resume", str(tmp_path / "on"))
    assert error_of("--resume", str(tmp_path)).startswith(f"run {tmp_path} has no config.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3\n", "{file}: unknown key 'epoch'"),
        ("[optim]\nlrr = 3\n", "{file}: unknown key 'optim.lrr'"),
        ("epochs = 'x'\n", "{file}: epochs is 'x'\n  expected: a whole number"),
        ("seed = true\n", "{file}: seed is True\n  expected: a whole number"),
        ("overwrite = 1\n", "{file}: overwrite is 1\n  expected: true or false"),
        ("optim = 3\n", "{file}: optim is 3\n  expected: a table"),
        ("[optim]\nname = 'adm'\n", "{file}: optim.name is 'adm'\n  expected: one of adam, sgd\n  fix: "),
        ("[optim]\nlr = -1\n", "{file}: --optim.lr is -1.0\n  expected: a number > 0"),
        ("[model]\nhidden = 3\n", "{file}: model.hidden is 3\n  expected: a list, each a whole number"),
        ("a = = 3\n", "{file} is not TOML: "),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    assert error_of("--config", file).startswith(message.format(file=file))


def test_unknown_keys_get_the_nearest_match_with_its_table(tmp_path: Path) -> None:
    file = write(tmp_path, "[optim]\nlrr = 3\n")
    assert "fix: did you mean 'optim.lr'?" in error_of("--config", file)


def test_a_bad_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[optim]\nlr = 0.1\n")
    assert error_of("--config", file, "--optim.lr", "-2").startswith("--optim.lr is -2.0")


@pytest.mark.parametrize("what", ["missing", "folder", "latin"])
def test_a_file_that_cannot_be_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "latin":
        path.write_bytes(b'target = "\xe9"\n')
    expected = {"missing": "no such file", "folder": "is a folder", "latin": "not UTF-8"}[what]
    assert expected in error_of("--config", str(path))


def test_given_names_both_spellings_of_a_boolean() -> None:
    names = given(["--no-overwrite", "--optim.no-decay_biases", "--x=1"])
    assert {"overwrite", "optim.decay-biases", "x"} <= names


def test_missing_and_surplus_positional_words() -> None:
    from quire.cli.predict import PredictOptions

    with pytest.raises(InputError, match="FILE missing"):
        check_words(PredictOptions, ["runs/x"], "quire predict")
    with pytest.raises(InputError, match="unexpected word 'c'"):
        check_words(PredictOptions, ["a", "b", "c"], "quire predict")
    check_words(PredictOptions, ["a", "--mode", "mean", "b"], "quire predict")
