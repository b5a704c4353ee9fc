"""One image file to pixels: colours, orientation, shapes, and files that are not what they seem."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from quire.data.images.decode import Shape, decode, is_image, read_header
from quire.errors import DataError
from tests.data.images.making import noise, save

MOST = 10**8


def whole(path: Path, channels: int = 3) -> np.ndarray:
    """At its own size."""
    with Image.open(path) as image:
        shape = Shape(image.height, image.width, channels, "stretch")
    return decode(path, shape, MOST)


def test_pixels_come_as_stored(tmp_path: Path) -> None:
    pixels = noise(7, 5)
    found = whole(save(tmp_path / "a.png", pixels))
    assert (found.dtype, found.shape) == (np.uint8, (3, 5, 7))
    assert (found == pixels.transpose(2, 0, 1)).all()
    grey = whole(save(tmp_path / "g.png", noise(7, 5, 1)), channels=1)
    assert (grey[0] == noise(7, 5, 1)).all()


def test_colours_are_brought_to_one_kind(tmp_path: Path) -> None:
    pixels = noise(4, 3)
    red, green, blue = (pixels[..., i].astype(float) for i in range(3))
    luma = whole(save(tmp_path / "rgb.png", pixels), channels=1)[0]
    assert np.abs(luma - (0.299 * red + 0.587 * green + 0.114 * blue)).max() <= 0.51
    grey = noise(4, 3, 1)
    assert (whole(save(tmp_path / "grey.png", grey)) == grey).all()
    bits = grey > 127
    assert (whole(save(tmp_path / "bits.png", bits), channels=1)[0] == bits * 255).all()
    palette = Image.fromarray(pixels).quantize(8)
    palette.save(tmp_path / "palette.png")
    assert (whole(tmp_path / "palette.png").transpose(1, 2, 0) == np.asarray(palette.convert("RGB"))).all()


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    pixels = np.array([[[200, 100, 0, 255], [200, 100, 0, 0], [200, 100, 0, 51]]], np.uint8)
    found = whole(save(tmp_path / "alpha.png", pixels))[:, 0].T
    # 51 of 255 is a fifth of the colour and four fifths of white
    assert found.tolist() == [[200, 100, 0], [255, 255, 255], [244, 224, 204]]
    grey = np.array([[[0, 255], [0, 0]]], np.uint8)
    Image.fromarray(grey, "LA").save(tmp_path / "la.png")
    assert whole(tmp_path / "la.png", channels=1).tolist() == [[[0, 255]]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.save(tmp_path / "p.png", transparency=1)
    assert whole(tmp_path / "p.png")[:, 0].T.tolist() == [[10, 20, 30], [255, 255, 255]]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_become_eight(tmp_path: Path, ending: str) -> None:
    deep = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    path = save(tmp_path / f"deep.{ending}", deep)
    assert read_header(path, MOST).grey
    assert whole(path, channels=1).tolist() == [[[0, 0, 1, 1, 128, 255]]]


def test_numbers_of_unknown_range_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "float.tif", np.ones((2, 2), np.float32))
    with pytest.raises(
        DataError, match=r"float\.tif: pixels of 32 bits \(mode F\), whose range is not known"
    ):
        whole(path)


ORIENTED = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: p.swapaxes(0, 1)[::-1, ::-1],
    8: lambda p: np.rot90(p, 1),
}


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "tif"])
def test_orientation_of_the_camera(tmp_path: Path, turn: int, ending: str) -> None:
    """The stored rows and columns by the definition of the EXIF tag, written with NumPy."""
    stored = noise(7, 5)
    exif = Image.Exif()
    exif[0x0112] = turn
    path = save(tmp_path / f"a.{ending}", stored, exif=exif)
    shown = ORIENTED[turn](stored)
    shape = Shape(*shown.shape[:2], 3, "stretch")
    assert (decode(path, shape, MOST).transpose(1, 2, 0) == shown).all()
    if ending == "png":
        header = read_header(path, MOST)
        assert (header.size, header.upright_size) == ((7, 5), shown.shape[1::-1])
        raw = decode(path, Shape(5, 7, 3, "stretch"), MOST, upright=False)
        assert (raw.transpose(1, 2, 0) == stored).all()


def test_fit_crop_takes_the_middle(tmp_path: Path) -> None:
    """The same as scaling the whole image until its shorter side fits, and cutting out the middle."""
    path = save(tmp_path / "a.png", noise(30, 10))
    scaled = Image.open(path).resize((12, 4), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((4, 0, 8, 4))).transpose(2, 0, 1)
    assert (decode(path, Shape(4, 4, 3, "crop"), MOST) == expected).all()


def test_fit_pad_keeps_everything(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.full((5, 10, 3), 200, np.uint8))
    found = decode(path, Shape(8, 8, 3, "pad"), MOST)
    assert (found[:, 2:6] == 200).all()
    assert (found[:, :2] == 0).all()
    assert (found[:, 6:] == 0).all()


def test_fit_stretch_and_antialiasing(tmp_path: Path) -> None:
    """Shrinking averages: stripes of one pixel become grey instead of one of the two colours."""
    stripes = np.zeros((64, 128), np.uint8)
    stripes[:, ::2] = 255
    found = decode(save(tmp_path / "a.png", stripes), Shape(8, 8, 1, "stretch"), MOST)
    assert found.shape == (1, 8, 8)
    assert np.abs(found.astype(int) - 128).max() < 20


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("size", [(1, 300), (300, 1), (3, 7), (223, 225), (1000, 999)])
def test_any_size_becomes_the_shape(tmp_path: Path, fit: str, size: tuple[int, int]) -> None:
    path = save(tmp_path / "a.png", noise(*size))
    assert decode(path, Shape(24, 17, 3, fit), MOST).shape == (3, 24, 17)


# 900 × 300 can be divided by 2, 4 and 8; twice the wanted 32 pixels must be left of the sides that count
@pytest.mark.parametrize(
    ("fit", "decoded"), [("crop", (225, 75)), ("pad", (113, 38)), ("stretch", (225, 75))]
)
@pytest.mark.parametrize("turn", [1, 6])
def test_large_photographs_are_decoded_small(
    tmp_path: Path, fit: str, decoded: tuple[int, int], turn: int
) -> None:
    """A JPEG decoded at a fraction of its size looks like one decoded whole."""
    rows, columns = np.mgrid[0:300, 0:900] / 900
    smooth = np.stack([rows, columns, (rows + columns) / 2], 2)
    pixels = (smooth * 255).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = turn
    jpeg = save(tmp_path / "a.jpg", pixels, quality=95, exif=exif)
    png = save(tmp_path / "a.png", np.asarray(Image.open(jpeg)), exif=exif)
    shape = Shape(32, 32, 3, fit)
    seen: list[tuple[int, int]] = []
    draft = JpegImageFile.draft

    def watch(self: JpegImageFile, mode: str | None, size: tuple[int, int]) -> object:
        found = draft(self, mode, size)
        seen.append(self.size)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JpegImageFile, "draft", watch)
        small = decode(jpeg, shape, MOST)
    assert seen == [decoded]
    assert np.abs(small.astype(int) - decode(png, shape, MOST)).mean() < 2


# -- What is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "bmp", "tif", "webp", "ppm"])
def test_cut_off_files_are_named(tmp_path: Path, ending: str) -> None:
    path = save(tmp_path / f"photo.{ending}", noise(64, 64))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=rf"photo\.{ending}: it cannot be") as caught:
        decode(path, Shape(8, 8, 3, "crop"), MOST)
    assert caught.value.fix == (
        "replace or remove the file, or leave such files out with --images.broken skip"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"<html>not found</html>", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
    ],
)
def test_files_that_are_no_images(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for call in (lambda: read_header(path, MOST), lambda: decode(path, Shape(8, 8, 3, "crop"), MOST)):
        with pytest.raises(DataError, match=rf"a\.png: {message}"):
            call()


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.png: no such image"):
        read_header(tmp_path / "a.png", MOST)
    (tmp_path / "b.png").mkdir()
    with pytest.raises(DataError, match=r"b\.png: it cannot be read: Is a directory"):
        read_header(tmp_path / "b.png", MOST)


def huge_header(path: Path, side: int) -> Path:
    """A bitmap that says it is `side` × `side` and holds nothing."""
    save(path, np.zeros((1, 1), np.uint8))
    content = bytearray(path.read_bytes())
    content[18:26] = side.to_bytes(4, "little") * 2
    path.write_bytes(content)
    return path


def test_huge_images_are_refused_before_decoding(tmp_path: Path) -> None:
    path = huge_header(tmp_path / "a.bmp", 20_000)
    with pytest.raises(DataError) as caught:
        read_header(path, MOST)
    assert str(caught.value) == (
        f"{path}: an image of 20000 × 20000 pixels\n"
        "  expected: at most 100000000 pixels\n"
        "  fix: shrink it, raise --images.most_pixels, or leave it out with --images.broken skip"
    )


def test_our_limit_counts_and_pillows_own_is_left_alone(tmp_path: Path) -> None:
    """Pillow warns above its limit and refuses twice of it; the option alone decides here."""
    path = huge_header(tmp_path / "a.bmp", 20_000)
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=read_header, args=(path, 10**9)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_header(path, 10**9).size == (20_000, 20_000)
    assert before is not None
    assert before == Image.MAX_IMAGE_PIXELS


def test_damaged_camera_tags_do_not_matter(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", noise(8, 8), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_header(path, MOST).turn == 1


def test_grey_is_told_from_the_header(tmp_path: Path) -> None:
    grey = Image.fromarray(noise(8, 8, 1))
    colour = Image.fromarray(noise(8, 8))
    ramp = [value for level in range(0, 256, 32) for value in (level, level, level)]
    palette = Image.fromarray(noise(8, 8, 1) % 8, "P")
    palette.putpalette(ramp)
    cases = {"g.png": grey, "g.jpg": grey, "p.png": palette, "la.png": grey.convert("LA")}
    for name, image in cases.items():
        image.save(tmp_path / name)
        assert read_header(tmp_path / name, MOST).grey, name
    for name, image in {"c.png": colour, "c.jpg": colour, "q.png": colour.quantize(4)}.items():
        image.save(tmp_path / name)
        assert not read_header(tmp_path / name, MOST).grey, name


def test_names_of_images() -> None:
    assert is_image(Path("a/B.JPG"))
    assert not is_image(Path("a/.hidden.jpg"))
    assert not is_image(Path("a/notes.txt"))
