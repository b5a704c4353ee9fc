"""The fitted preparation against scikit-learn's transformers and cases worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from quire.data import Preparation, PrepareInputs, from_dataframe, read_table, table_from_arrays
from quire.data.builtin import builtin
from quire.data.columns import mean_and_std
from quire.data.table import Table, make_table
from quire.errors import DataError, InputError
from quire.options import Table as Options

MIXED = """size,town,sold,when,ident,price
1,rome,true,2024-01-01,u1,10.5
2,oslo,false,2024-01-03,u2,20.5
,oslo,,2024-01-05,u3,30.5
9,,true,2024-01-07,u4,40.5
100,bonn,true,2024-03-01,u5,50.5
"""


def mixed(folder: Path, text: str = MIXED, name: str = "t.csv") -> Table:
    path = folder / name
    path.write_text(text)
    return read_table(path)


def test_by_hand(tmp_path: Path) -> None:
    """Training rows are the first four. size 1, 2, 9: mean 4, variance 38/3, median 2. Dates: mean
    January 4th, so days −3, −1, 1, 3: variance 5. The fifth row has a town that training lacks."""
    table = mixed(tmp_path)
    preparation = Preparation.fit(table, "price", train_rows=np.arange(4))
    assert preparation.feature_names == [
        "size", "size is missing", "town=oslo", "town=rome", "town is missing", "sold", "sold is missing",
        "when",
    ]  # fmt: skip
    prepared = preparation.transform(table, need_target=True)
    s, d = (38 / 3) ** 0.5, 5**0.5
    expected = [
        [-3 / s, 0, 0, 1, 0, 1, 0, -3 / d],
        [-2 / s, 0, 1, 0, 0, 0, 0, -1 / d],
        [-2 / s, 1, 1, 0, 0, 1, 1, 1 / d],
        [5 / s, 0, 0, 0, 1, 1, 0, 3 / d],
        [96 / s, 0, 0, 0, 0, 1, 0, 57 / d],
    ]
    torch.testing.assert_close(prepared.data.inputs, torch.tensor(expected))
    assert prepared.data.target.tolist() == [10.5, 20.5, 30.5, 40.5, 50.5]
    assert (preparation.target.mean, preparation.target.std) == pytest.approx((25.5, 125**0.5), rel=1e-14)
    assert preparation.warnings == (
        "column 'ident' is left out: each of its 5 texts is different, so it identifies rows; "
        "to keep it, use --table.categories 'ident'",
    )
    assert prepared.notes == ("column 'town': 1 of categories not in training, such as 'bonn'",)
    assert prepared.lines.tolist() == [2, 3, 4, 5, 6]
    kept = Preparation.fit(table, "price", Options(categories=("ident",)))
    assert "ident=u3" in kept.feature_names


@pytest.mark.parametrize("seed", range(3))
def test_against_scikit_learn(seed: int) -> None:
    """Median imputation with indicator, standardisation and one-hot of training rows only."""
    random = np.random.default_rng(seed)
    numbers = random.normal(5, 3, (60, 3)) * [1, 1e6, 1e-6]
    numbers[random.random((60, 3)) < [0.2, 0, 0.1]] = np.nan
    towns = random.choice(["rome", "oslo", "bonn", "bari"], 60)
    train = np.sort(random.permutation(60)[:40])
    columns = {f"n{i}": pa.array(numbers[:, i]) for i in range(3)} | {"town": pa.array(towns)}
    table = make_table(columns | {"y": pa.array(random.normal(size=60))}, "t")
    features = Preparation.fit(table, "y", train_rows=train).transform(table).data.inputs

    missing = np.isnan(numbers[train]).any(0)
    filled = SimpleImputer(strategy="median").fit(numbers[train]).transform(numbers)
    present = [numbers[train, i][~np.isnan(numbers[train, i])] for i in range(3)]
    expected = []
    for i in range(3):
        scaler = StandardScaler().fit(present[i][:, None])
        expected.append(scaler.transform(filled[:, i : i + 1]))
        expected += [np.isnan(numbers[:, i : i + 1]).astype(float)] * int(missing[i])
    encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore").fit(towns[train, None])
    expected.append(encoder.transform(towns[:, None]))
    np.testing.assert_allclose(features, np.concatenate(expected, 1), rtol=1e-6, atol=1e-6)


def test_rows_outside_training_change_nothing(tmp_path: Path) -> None:
    table = mixed(tmp_path)
    changed = mixed(tmp_path, MIXED.replace("100,bonn", "-7e9,mars").replace("2024-03-01", "1999-01-01"))
    rows = np.arange(4)
    assert Preparation.fit(table, "price", train_rows=rows) == Preparation.fit(
        changed, "price", train_rows=rows
    )
    assert Preparation.fit(table, "price") != Preparation.fit(changed, "price")


def test_json_round_trip(tmp_path: Path) -> None:
    table = mixed(tmp_path)
    for target, kind in (
        ("price", "auto"),
        ("sold", "auto"),
        ("size", "classification"),
        (("price", "size"), "auto"),
    ):
        whole = table.take(np.array([0, 1, 4]))
        preparation = Preparation.fit(whole, target, kind=kind)
        again = Preparation.from_json(json.loads(json.dumps(preparation.to_json())))
        assert again == preparation
        for name, buffer in preparation.module().named_buffers():
            other = again.module().get_buffer(name)
            torch.testing.assert_close(buffer, other, rtol=0, atol=0, equal_nan=True)
        ours, theirs = preparation.transform(table), again.transform(table)
        assert torch.equal(ours.data.inputs, theirs.data.inputs)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e300, 1e300), min_size=3, max_size=8))
def test_json_keeps_every_float(values: list[float]) -> None:
    table = table_from_arrays(np.array(values)[:, None], ["x"], target=np.arange(len(values)) + 0.5)
    preparation = Preparation.fit(table)
    column = preparation.inputs[0]
    assert np.isfinite([column.center, column.scale, column.fill]).all()
    assert column.scale > 0
    assert Preparation.from_json(json.loads(json.dumps(preparation.to_json()))) == preparation
    assert preparation.transform(table).data.inputs.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format 'quire.preparation', version 2"),
        ({"format": "other"}, "format 'other'"),
        ({"inputs": [{}]}, "a damaged preparation"),
        ({"columns": None}, "a damaged preparation"),
    ],
)
def test_damaged_json_is_refused(change: dict[str, object], message: str) -> None:
    entry = Preparation.fit(builtin("iris")).to_json()
    with pytest.raises(InputError, match=message):
        Preparation.from_json({**entry, **change})
    entry["inputs"][0]["kind"] = "os.system"
    with pytest.raises(InputError, match=r"a damaged preparation \(a column of kind 'os.system'\)"):
        Preparation.from_json(entry)


def test_columns_in_any_order_without_target(tmp_path: Path) -> None:
    preparation = Preparation.fit(mixed(tmp_path), "price")
    first = preparation.transform(mixed(tmp_path)).data.inputs
    rows = [line.split(",") for line in MIXED.splitlines()]
    order = [3, 1, 0, 2]  # when, town, size, sold; neither ident nor price
    text = "\n".join(",".join(["extra", *[row[i] for i in order]]) for row in rows)
    prepared = preparation.transform(preparation.read(mixed(tmp_path, text, "p.csv").source))
    assert torch.equal(prepared.data.inputs, first)
    assert prepared.notes == ("columns that training did not have are ignored: extra",)
    assert "target" not in prepared.data.fields
    with pytest.raises(DataError) as caught:
        preparation.transform(mixed(tmp_path, text, "p.csv"), need_target=True)
    assert str(caught.value).startswith(f"{tmp_path / 'p.csv'}: no column 'price'\n  expected: the target")


def test_faults_at_predict(tmp_path: Path) -> None:
    preparation = Preparation.fit(mixed(tmp_path), "price")

    def complaint(text: str, need_target: bool = False) -> str:
        path = tmp_path / "p.csv"
        path.write_text(text)
        with pytest.raises(DataError) as caught:
            preparation.transform(preparation.read(path), need_target)
        return str(caught.value).replace(str(path), "p.csv")

    assert complaint(MIXED.replace("size", "seize").replace("sold", "bought")) == (
        "p.csv: missing columns 'size', 'sold'\n  expected: the columns of training: size, town, sold, when\n"
        "  fix: 'size': did you mean 'seize'?"
    )
    # The town is no other column's misspelt name.
    assert complaint("towns,town\nA,B\n") == (
        "p.csv: missing columns 'size', 'sold', 'when'\n"
        "  expected: the columns of training: size, town, sold, when\n"
        "  fix: add the columns; the first line must hold the names"
    )
    assert "did you mean 'towns'" in complaint("size,towns,sold,when\n1,A,yes,2020-01-01\n")
    assert complaint(MIXED.replace("100", "many")) == (
        "p.csv:6:size: text in a numeric column (value 'many')\n"
        "  expected: a number, or an empty cell for a missing value\n  fix: correct the cell"
    )
    assert complaint(MIXED.replace("2024-03-01", "spring")).startswith("p.csv:6:when: not a date")
    assert complaint(MIXED.replace("false", "perhaps")).startswith("p.csv:3:sold: not a boolean")
    assert complaint(MIXED.replace("40.5", ""), True).startswith("p.csv:5:price: the target is missing")
    assert complaint(MIXED.replace("40.5", "1e39"), True).startswith("p.csv:5:price: a number too large")
    assert complaint("1,rome,true,2024-01-01\n").startswith("p.csv:1: a header but no rows")


def test_unknown_class_and_refused_missing(tmp_path: Path) -> None:
    table = mixed(tmp_path, "x,c\n1,a\n2,b\n3,a\n")
    preparation = Preparation.fit(table, options=Options(missing="refuse"))
    with pytest.raises(DataError) as caught:
        preparation.transform(mixed(tmp_path, "x,c\n1,a\n2,z\n"), need_target=True)
    assert str(caught.value) == (
        f"{table.source}:3:c: a class that was not in training (value 'z')\n  expected: one of a, b"
    )
    with pytest.raises(DataError, match=r":3:x: a missing value \(value '\?'\)"):
        preparation.transform(mixed(tmp_path, "x,c\n1,a\n?,b\n"))


def test_missing_only_at_predict(tmp_path: Path) -> None:
    """No indicator exists; the median and no category stand in, and a note says so."""
    preparation = Preparation.fit(mixed(tmp_path, "x,c,y\n1,a,1.5\n2,b,2.5\n9,a,3.5\n"))
    prepared = preparation.transform(mixed(tmp_path, "x,c\n?,\n2,b\n"))
    assert prepared.data.inputs[0, 0] == prepared.data.inputs[1, 0]
    assert prepared.data.inputs[0, 1:].tolist() == [0, 0]
    assert prepared.notes == (
        "column 'x': 1 missing, none in training; the training median is used",
        "column 'c': 1 missing, none in training; no one-hot feature is set",
    )


def test_without_header_columns_are_matched_by_position(tmp_path: Path) -> None:
    """The target stands first, so that without it every other column moves."""
    text = "a,1,4,u\nb,2,3,v\na,7,9,u\nb,0,1,v\n"
    table = mixed(tmp_path, text)
    preparation = Preparation.fit(table, 1)
    assert preparation.feature_names == ["column 2", "column 3", "column 4=u", "column 4=v"]
    first = preparation.transform(table).data.inputs
    path = tmp_path / "p.csv"
    path.write_text("\n".join(line[2:] for line in text.splitlines()))
    assert torch.equal(preparation.transform(preparation.read(path)).data.inputs, first)
    # With the last column dropped, names such as "column 2" exist in both files and mean other columns.
    dropped = Preparation.fit(table, 1, Options(drop=("column 4",)))
    assert torch.equal(dropped.transform(dropped.read(path)).data.inputs, first[:, :2])
    path.write_text("1,2\n")
    with pytest.raises(DataError) as caught:
        preparation.transform(preparation.read(path))
    assert str(caught.value) == (
        f"{path}: a table of 2 columns\n  expected: 4 columns as in training, or 3 without the target\n"
        "  fix: give the columns in the order of the training file"
    )


def test_a_frame_gives_what_its_file_gave(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = mixed(tmp_path)
    preparation = Preparation.fit(table, "price", Options(categories=("size",)))
    frame = pandas.read_csv(table.source, parse_dates=["when"])
    frame["sold"] = frame["sold"].astype("boolean")
    ours, theirs = preparation.transform(table, True), preparation.transform(from_dataframe(frame), True)
    assert torch.equal(ours.data.inputs, theirs.data.inputs)
    assert torch.equal(ours.data.target, theirs.data.target)


@pytest.mark.parametrize(
    ("cells", "kind", "classes"),
    [
        (["b", "a", "b", "a"], "classification", ["a", "b"]),
        (["true", "False", "true"], "classification", [False, True]),
        (["1", "0", "1", "0"], "classification", [0, 1]),
        ([str(i % 3) for i in range(15)], "classification", [0, 1, 2]),
        ([str(i % 3) for i in range(14)], "regression", []),
        ([str(i % 21) for i in range(500)], "regression", []),
        ([str(i % 10 + 0.5) for i in range(500)], "regression", []),
    ],
)
def test_kind_of_target(cells: list[str], kind: str, classes: list[object]) -> None:
    columns = {"x": pa.array(np.arange(len(cells)) * 1.5), "y": pa.array(cells)}
    preparation = Preparation.fit(make_table(columns, "t", typed=False))
    assert preparation.target.kind == kind
    assert preparation.target.classes == classes
    assert [type(label) for label in preparation.target.classes] == [type(label) for label in classes]


def test_kind_can_be_chosen_and_classes_keep_their_type() -> None:
    y = np.array([0.5, 1.5, 0.5, 1.5])
    table = table_from_arrays(np.arange(4.0)[:, None], target=y)
    preparation = Preparation.fit(table, kind="classification")
    target = preparation.encode_targets(table)
    assert target.dtype == torch.int64
    assert preparation.decode_classes(target) == [0.5, 1.5, 0.5, 1.5]
    assert Preparation.fit(table, options=Options(categories=("target",))).target.kind == "classification"
    assert Preparation.fit(table).target.kind == "regression"
    integers = table_from_arrays(np.arange(4.0)[:, None], target=np.array([3, 7, 3, 7]))
    labels = Preparation.fit(integers).decode_classes([1, 0])
    assert labels == [7, 3]
    assert all(type(label) is int for label in labels)


def test_targets_by_name_and_position(tmp_path: Path) -> None:
    table = mixed(tmp_path, "7,b,1\n0.5,u,1.5\n1.5,v,2.5\n2.5,u,3.5\n").source
    table = read_table(table, Options(header="yes"))
    for target, name in (
        ("b", "b"),
        ("2", "b"),
        (2, "b"),
        ("-1", "1"),
        (-3, "7"),
        ("7", "7"),
        ("1", "1"),
        (None, "1"),
    ):
        assert Preparation.fit(table, target).target.name == name
    assert Preparation.fit(table, None, Options(drop=("1",))).target.name == "b"
    several = Preparation.fit(table, ["7", "1"])
    assert [target.name for target in several.targets] == ["7", "1"]
    assert several.encode_targets(table).tolist() == [[0.5, 1.5], [1.5, 2.5], [2.5, 3.5]]
    mixed_kinds = Preparation.fit(table, ["b", "1"]).encode_targets(table)
    assert mixed_kinds.tolist() == [[0, 1.5], [1, 2.5], [0, 3.5]]
    classes = Preparation.fit(table, ["b"], kind="classification")
    assert classes.encode_targets(table).tolist() == [0, 1, 0]
    assert Preparation.fit(table, ()).targets == ()
    with pytest.raises(InputError, match=r"the target 'b' is also in --table\.drop"):
        Preparation.fit(table, "b", Options(drop=("b",)))
    with pytest.raises(InputError, match="named twice"):
        Preparation.fit(table, ["b", "2"])


def test_warnings_about_columns_that_do_not_help() -> None:
    columns = {
        "same": ["3"] * 20,
        "none": [""] * 20,
        "copy": ["yes", "no"] * 10,
        "x": [str(i) for i in range(20)],
        "y": ["1", "0"] * 10,
    }
    table = make_table({name: pa.array(cells) for name, cells in columns.items()}, "t", typed=False)
    preparation = Preparation.fit(table)
    assert preparation.warnings == (
        "column 'none' is left out: it has no values",
        "the same value in all training rows of same",
        "column 'copy' tells 'y' in every training row; if it is the same under another name, "
        "use --table.drop 'copy'",
    )
    assert preparation.transform(table).data.inputs[:, 0].tolist() == [0] * 20


def test_text_with_too_many_values_is_left_out() -> None:
    names = [f"n{i % 250}" for i in range(1000)]
    columns = {"name": pa.array(names), "x": pa.array(np.arange(1000.0)), "y": pa.array(np.arange(1000) / 7)}
    table = make_table(columns, "t", typed=False)
    preparation = Preparation.fit(table)
    assert preparation.feature_names == ["x"]
    assert "250 different texts are more than 200" in preparation.warnings[0]
    assert len(Preparation.fit(table, options=Options(categories=("name",))).feature_names) == 251


@pytest.fixture
def stage(tmp_path: Path) -> tuple[PrepareInputs, torch.Tensor]:
    table = mixed(tmp_path)
    preparation = Preparation.fit(table, "price", train_rows=np.arange(4))
    return preparation.module(), preparation.encode(table)[0]


def test_exported_stage_equals_eager(stage: tuple[PrepareInputs, torch.Tensor]) -> None:
    module, codes = stage
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(module, (codes,), dynamic_shapes={"codes": {0: rows}})
    more = codes.repeat(3, 1)
    assert torch.equal(program.module()(more), module(more))


@pytest.mark.slow
def test_onnx_equals_eager(stage: tuple[PrepareInputs, torch.Tensor], tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, codes = stage
    for dtype in (torch.float32, torch.float64):
        path = tmp_path / f"{dtype}.onnx"
        torch.onnx.export(module.eval(), (codes.to(dtype),), path, dynamo=True, verbose=False)
        session = runtime.InferenceSession(path)
        (features,) = session.run(None, {session.get_inputs()[0].name: codes.to(dtype).numpy()})
        np.testing.assert_allclose(features, module(codes.to(dtype)), rtol=1e-6)


def test_stage_takes_float32_and_has_nothing_to_learn(stage: tuple[PrepareInputs, torch.Tensor]) -> None:
    module, codes = stage
    torch.testing.assert_close(module(codes.float()), module(codes))
    assert module(codes).dtype == torch.float32
    assert not list(module.parameters())
    assert not module.state_dict()


@pytest.mark.gpu
def test_stage_on_gpu(stage: tuple[PrepareInputs, torch.Tensor]) -> None:
    module, codes = stage
    expected = module(codes)
    torch.testing.assert_close(module.cuda()(codes.cuda()).cpu(), expected)


def test_mean_and_std_of_extreme_values() -> None:
    assert mean_and_std(np.array([0.1] * 7)) == (0.1, 0.0)
    assert mean_and_std(np.array([1e308, -1e308])) == (0.0, 1e308)
    values = np.random.default_rng(0).normal(size=50)
    np.testing.assert_allclose(mean_and_std(values), (values.mean(), values.std()), rtol=1e-12)
