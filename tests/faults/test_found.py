"""What fuzzing and hostile files have found, each with the words that it is refused with now."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save

from quire.data import read_table
from quire.data.images.decode import Shape, decode
from quire.data.images.idx import read_array
from quire.data.reading import read_preparation
from quire.data.streamed import open_rows
from quire.data.text.tokenfile import read_token_file
from quire.data.types import read_numbers
from quire.errors import CheckpointError, DataError, InputError
from quire.files import parse_toml
from quire.models.gpt_files import read_gpt2
from quire.models.weights import read_weights
from quire.report.pictures import embed
from quire.report.reading import Run, Target, read_predictions
from quire.report.style import INK
from tests.faults import bombs, payloads
from tests.faults.random_words import call


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (payloads.npy(b"\xff" * 4, descr="'<U1'"), "values that cannot be read"),
        (payloads.npy(b"", descr="'<f8'", shape="(0, 3)"), "0 rows of 3 columns"),
        (payloads.npy(b"", descr="'|u1'", shape=f"(0, {2**40})"), f"0 rows of {2**40} columns"),
        (payloads.npy(bytes(2**19), descr="'|u1'", shape=f"(1, {2**19})"), "at most 262144 columns"),
        (payloads.npy(bytes(8), descr="[('a', '<f4', (2,))]"), r"cells of shape \(2,\)"),
    ],
)
def test_arrays(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "file.npy").write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_table(tmp_path / "file.npy")
    assert "file.npy" in str(caught.value)


def test_arrays_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "file.npy", np.array([[1.5, 2.5]], ">f8"))
    assert read_table(tmp_path / "file.npy").row(0) == {"column 1": 1.5, "column 2": 2.5}


def test_a_parquet_file_whose_names_are_no_text(tmp_path: Path) -> None:
    file = io.BytesIO()
    parquet.write_table(pa.table({"QQQQ": [1.0]}), file, store_schema=False)
    (tmp_path / "file.parquet").write_bytes(file.getvalue().replace(b"QQQQ", b"\xb3\xb3\xb3\xb3"))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_table(tmp_path / "file.parquet")


def test_a_parquet_file_of_lists(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [[1], []], "b": [1.0, 2.0]}), tmp_path / "file.parquet")
    table = read_table(tmp_path / "file.parquet")
    assert table.column("a").null_count == 2  # of what is in them nothing is read
    with pytest.raises(DataError, match="values of type list") as caught:
        read_numbers(table, "a")
    assert "one number, boolean, date or text in each cell" in str(caught.value)


@pytest.mark.parametrize("make", [bombs.texts, bombs.categories])
def test_one_long_text_in_many_rows(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError, match="bytes that unpacks to 6"):
        read_table(path)


def test_texts_of_a_parquet_file_are_those_that_were_written(tmp_path: Path) -> None:
    """Short and long, repeated and missing, of several kinds, in two groups of rows."""
    texts = ["a", None, "é" * 70, "a", "", "b"]
    table = pa.table({"plain": texts, "large": pa.array(texts, pa.large_string()), "number": range(6)})
    table = table.append_column("category", pa.array(texts).dictionary_encode())
    parquet.write_table(table, tmp_path / "file.parquet", row_group_size=3)
    read = read_table(tmp_path / "file.parquet")
    for name in ("plain", "large", "category"):
        assert read.column(name).to_pylist() == texts, name
    assert pa.types.is_string(read.column("plain").type)


def test_images_of_no_pixels(tmp_path: Path) -> None:
    (tmp_path / "x-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">III", 2**31, 2**31, 0))
    with pytest.raises(DataError, match="a file of no values"):
        read_array(tmp_path / "x-idx3-ubyte", 3)


def test_a_progressive_jpeg_that_is_much_larger_than_its_file(tmp_path: Path) -> None:
    (tmp_path / "large.jpg").write_bytes(bombs.progressive_jpeg(4_000))
    with pytest.raises(DataError, match=r"4000 × 4000 pixels in .* bytes, out of proportion"):
        decode(tmp_path / "large.jpg", Shape(8, 8, 3, "crop"), 10**8)
    (tmp_path / "small.jpg").write_bytes(bombs.progressive_jpeg(400))
    assert decode(tmp_path / "small.jpg", Shape(8, 8, 3, "crop"), 10**8).shape == (3, 8, 8)


def test_weights_that_are_packed(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(payloads.zip_bomb("archive/data/0", 60))
    with pytest.raises(DataError, match=r"a file of .* bytes that unpacks to 6291"):
        read_weights(tmp_path / "file.pt")


@pytest.mark.parametrize("epsilon", ["1e-5", None, [1], -1, True, float("inf")])
def test_a_description_of_gpt2_with_another_epsilon(epsilon: object, tmp_path: Path) -> None:
    shapes = {"wte.weight": (4, 64), "wpe.weight": (4, 64), "h.0.mlp.c_fc.weight": (64, 256)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    (tmp_path / "model.safetensors").write_bytes(save(tensors))
    (tmp_path / "config.json").write_text(json.dumps({"layer_norm_epsilon": 1e-6}))
    assert read_gpt2(tmp_path)[1]["norm_epsilon"] == 1e-6
    (tmp_path / "config.json").write_text(json.dumps({"layer_norm_epsilon": epsilon}))
    with pytest.raises(DataError, match="layer_norm_epsilon is"):
        read_gpt2(tmp_path)


@pytest.mark.parametrize("inner", ["<g>" * 5000 + "</g>" * 5000, ""])
def test_a_picture_that_is_too_deep_or_has_no_width(inner: str) -> None:
    wide = "9" if inner else "x"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} 9" fill="{INK}">{inner}</svg>'
    markup, width = embed(svg, "file.svg", "a picture")
    assert markup.startswith("<img ")
    assert width == 0


def test_predictions_of_text_where_numbers_belong(tmp_path: Path) -> None:
    table = pa.table({"row": [1], "truth": ["many"], "prediction": ["few"]})
    parquet.write_table(table, tmp_path / "predictions.parquet")
    with pytest.raises(CheckpointError, match="its columns are not those of predictions"):
        read_predictions(Run(tmp_path, {}), Target("value", "regression"))


def test_tokens_that_are_counted_in_fractions(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(bytes(4))
    entry = {
        "format": "quire.tokens",
        "version": 1,
        "bytes": 2,
        "sha256": hashlib.sha256(bytes(4)).hexdigest(),
        "tokeniser": {"kind": "bytes", "specials": []},
        "notes": [],
    }
    for counts, there in (({"train": 2}, True), ({"train": 2.0}, False)):
        (tmp_path / "file.json").write_text(json.dumps({**entry, "counts": counts}))
        assert (read_token_file(tmp_path / "file") is not None) is there


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b".".join([b"a"] * 5_000) + b" = 1", "a key of more than 64 parts"),
        (b"[" + b" . ".join([b'"\xc3\xa9 x"'] * 5_000) + b"]", "a key of more than 64 parts"),
        (b"#" * (2**20 + 1), "1048577 bytes of settings; 1048576 are allowed"),
    ],
)
def test_settings_that_would_take_much_room(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_toml(content)
    assert parse_toml(b'a = "' + b"x" * 10**6 + b'"')  # at once
    dotted = ".".join(["a"] * 60)
    assert parse_toml(f'{dotted} = "1.2.3"\nb = "Words. And. More."'.encode())["b"] == "Words. And. More."


def test_predictions_whose_names_are_no_text(tmp_path: Path) -> None:
    file = io.BytesIO()
    table = pa.table({"row": [1], "truth": [1.0], "prediction": [2.0], "QQQQ": [1.0]})
    parquet.write_table(table, file, store_schema=False)
    (tmp_path / "predictions.parquet").write_bytes(file.getvalue().replace(b"QQQQ", b"\x8e\x8e\x8e\x8e"))
    with pytest.raises(CheckpointError, match=r"predictions\.parquet is damaged"):
        read_predictions(Run(tmp_path, {}), Target("value", "regression"))


MANY_ROWS = (
    "c-oayJ#Q015S?A04r5s;u`;V&$%PAi3K9uPq(l*NgyxL-5C;Sc1TG!RI;RLW4&Ve)q)3?`K*<lGq@<vw<R8${P%yK1wj+{;("
    "P?LP=Ixs|dw09kUdI3za4A8JPyr}b!P~Dp2v|XL)0aaGtF}0;%p;?hFUc-0vb$Q-ycU$wz!Xbp6L!*}bX{@bNS5P&du+k7I="
    "1TQ97CW~fu-R!tOyP=ElODhhSB0Z`ijlb7`S8;Y<Sok^bfii0+#C9sxDwz{9YXrnGr#DJurc*x<&+5EV)ex7aT)To4|Zg=Bt"
    "XfqvHQf?lP4;HSkax8aF~0Y0)M<%F`ZuzQ;#%s-hDeeN*R0zd*qnnFNBI1YA7?=ID8j=jK)PT{kXViDRH=@e2H5b5<~ae*FI"
    "VxxiIhrgr=3%iGyK*-!eG*mg>6&nUA;L=%crx<`~!)0ZfYi5^SPBzou*b5B_*9!iwZl&ZNV)c)+iCtu9*Gz&WuUY>jqXlI6R"
    "`+Db6d@hwYEs0v5Hx<1PMEA6qS?jI`#c2+m<s~_g7Cg`WycOjmvF+@Dt&O_lH}CpyS9+t-N_RXSPHOM_<HP;o>)OWF>e}kMY"
    "w#zPJ#fPBdYAvJzwrE#eg"
)
"""A Parquet file of two rows, in a group that says it has 55,937,267,326."""


@pytest.mark.parametrize("read", [read_table, open_rows])
def test_a_group_of_more_rows_than_its_file(read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file.parquet").write_bytes(zlib.decompress(base64.b85decode(MANY_ROWS)))
    with pytest.raises(DataError, match=r"groups of \[55937267326\] rows in a file of 2"):
        read(tmp_path / "file.parquet")


def test_large_arrays_of_no_columns_and_of_too_many(tmp_path: Path) -> None:
    for shape in ((0, 2**40), (3, 0)):
        (tmp_path / "file.npy").write_bytes(payloads.npy(b"", descr="'<f8'", shape=str(shape)))
        with pytest.raises(DataError, match="an array of type float64 and shape"):
            open_rows(tmp_path / "file.npy")
    (tmp_path / "file.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match="a file that cannot be read"):
        open_rows(tmp_path / "file.npy")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "gpt", "--no-time", "--device", "nowhere"], "device 'nowhere'"),
        (["explain", "gpt", "--no-time", "--memory", "9" * 400], "--memory with a number of hundreds"),
        (["explain", "gpt", "--no-time", "--batch", str(10**30)], "a whole number, 9223372036854775807 at"),
        (["train", "mlp", "--optim.lr", "9" * 400], "--optim.lr is inf"),
        (["train", "mlp", "--optim.schedule.scale", str(10**400)], "--optim.schedule.scale is"),
        (["train", "mlp", "--out", "\udcff"], "'\\udcff', which is no text in UTF-8"),
        (["train", "gru", "--steps", "1", "--model.width", str(2**60)], "not enough memory: "),
        (["study", "nowhere", "folds", "--epochs", "1e400"], "--epochs inf"),
        (["study", "nowhere", "bias-variance", "--noise", "nan"], "--noise nan"),
    ],
)
def test_words_that_no_machine_can_follow(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = call(words)
    assert said.code in (1, 2), said
    assert told in said.error, said
    assert "--debug" not in said.error
    assert not [*tmp_path.rglob("*")]


def test_a_preparation_of_an_odd_format() -> None:
    with pytest.raises(InputError):
        read_preparation({"format": {}})
