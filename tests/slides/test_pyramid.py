"""The TIFF writer, against two readers that know nothing of it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.slides.heatmap import TILE, write_pyramid


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize("shape", [(1, 1), (256, 256), (257, 300), (700, 1301)])
def test_pillow_reads_every_level_back(tmp_path: Path, shape: tuple[int, int]) -> None:
    image = picture(*shape)
    write_pyramid(tmp_path / "a.tif", image, (0.5, 0.25), "a note")
    with Image.open(tmp_path / "a.tif") as found:
        np.testing.assert_array_equal(np.asarray(found), image)
        assert found.tag_v2[270] == "a note" and found.tag_v2[254] == 0 and found.tag_v2[322] == TILE
        sizes = []
        for level in range(found.n_frames):
            found.seek(level)
            sizes.append(found.size)
            assert found.tag_v2[254] == (level > 0)
            across = found.size[0] * 10_000 / float(found.tag_v2[282])  # microns from edge to edge
            assert across == pytest.approx(shape[1] * 0.5, rel=1e-3)
    assert max(sizes[-1]) <= TILE
    assert all(b == ((a[0] + 1) // 2, (a[1] + 1) // 2) for a, b in zip(sizes, sizes[1:], strict=False))
    assert [file.name for file in tmp_path.iterdir()] == ["a.tif"]


def test_openslide_reads_it_as_a_pyramid_of_known_scale(tmp_path: Path) -> None:
    openslide = pytest.importorskip("openslide")
    image = picture(700, 1301)
    write_pyramid(tmp_path / "a.tif", image, (0.5, 0.25))
    with openslide.OpenSlide(str(tmp_path / "a.tif")) as slide:
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
        assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.25)
        assert slide.level_dimensions == ((1301, 700), (651, 350), (326, 175), (163, 88))
        whole = np.asarray(slide.read_region((0, 0), 0, slide.dimensions))
        np.testing.assert_array_equal(whole[..., :3], image)
        half = np.asarray(slide.read_region((0, 0), 1, (650, 350)))[..., :3].astype(int)
    blocks = image[:, :1300].reshape(350, 2, 650, 2, 3).mean(axis=(1, 3))
    assert np.abs(half - blocks)[:, :300].max() <= 1.5 + 255 / 650  # an odd width is resized, not halved exactly
