"""Composed photographs: C* is the object to the pixel, the object decides, the background holds in the sources only."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data.learned import columns, fit, is_shortcut
from PIL import Image

from patchgen.data.compose import Composition, compose, cut_out
from patchgen.data.oracle import Sample, half_covered, true_masks
from patchgen.data.oracle_draw import LOOKS, styled
from patchgen.data.table import read_table

CLASSES = ("bars", "checks", "pillars", "plain")
PER_CLASS = 20
MAGENTA = (255, 0, 255)  # far from every background, in every style


def draw_photograph(kind: str, rng: np.random.Generator, height: int = 60, width: int = 72) -> np.ndarray:
    """(height, width, 3) uint8: stripes in two random colours; their direction is the class."""
    y, x = np.mgrid[:height, :width] + rng.integers(0, 12, 2)[:, None, None]
    dark = {"bars": y % 12 < 6, "pillars": x % 12 < 6, "checks": (y % 12 < 6) ^ (x % 12 < 6), "plain": y < 0}[kind]
    colours = np.array([rng.integers(150, 250, 3), rng.integers(10, 90, 3)])
    return (colours[dark.astype(int)] + rng.integers(-5, 6, (height, width, 3))).clip(0, 255).astype(np.uint8)


def write_photographs(root: Path, count: int, classes: tuple[str, ...] = CLASSES, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for kind in classes:
        (root / kind).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(draw_photograph(kind, rng)).save(root / kind / f"{i:03d}.{'png' if i % 2 else 'jpg'}")
    return root


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photographs(tmp_path_factory.mktemp("photographs") / "own", 4 * PER_CLASS + 3)


@pytest.fixture(scope="module")
def composition(photographs: Path) -> Composition:
    return compose(photographs, per_class=PER_CLASS)


@pytest.fixture(scope="module")
def samples(composition: Composition) -> list[Sample]:
    return list(composition)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Two classes of four photographs: one for each domain."""
    return write_photographs(tmp_path / "few", 4, ("bars", "plain"))


def object_features(sample: Sample) -> np.ndarray:
    """Contrast of the cut-out, and its edges down and across relative to that."""
    rows, columns = np.flatnonzero(sample.mask.any(1)), np.flatnonzero(sample.mask.any(0))
    gray = sample.image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean(-1)
    contrast = gray.std() + 1
    edges = [abs(np.diff(gray, axis=axis)).mean() / contrast for axis in (0, 1)]
    return np.array([np.log(contrast), *edges])


def context_features(sample: Sample) -> np.ndarray:
    """Median colour and mean edges of all pixels outside the object."""
    image, rest = sample.image.astype(np.float64), ~sample.mask
    down, across = abs(np.diff(image, axis=0)), abs(np.diff(image, axis=1))
    edges = [down[rest[1:] & rest[:-1]].mean(0), across[rest[:, 1:] & rest[:, :-1]].mean(0)]
    return np.concatenate([np.median(image[rest], axis=0), *edges])


def test_the_object_decides_in_the_unseen_domain_and_the_rest_is_a_shortcut(samples: list[Sample]) -> None:
    label, unseen = columns(samples)
    features = np.array([object_features(s) for s in samples])
    model = fit(features[~unseen], label[~unseen])
    assert model.score(features[unseen], label[unseen]) >= 0.99
    assert is_shortcut(samples, context_features)


def test_no_photograph_is_used_twice(composition: Composition) -> None:
    used = composition.photographs
    assert len(set(used)) == len(used) == 4 * 4 * PER_CLASS
    assert [path.split("/")[0] for path in used] == [name.split("/")[1] for name in composition.names]
    assert [domain.correlation for domain in composition.spec.domains] == [0.99, 0.97, 0.95, 0.25]


def test_copies_of_a_photograph_count_once(few: Path) -> None:
    shutil.copy(few / "bars" / "000.jpg", few / "bars" / "copy.jpg")
    assert len(set(compose(few, num_classes=2, per_class=1).photographs)) == 8
    (few / "bars" / "003.png").unlink()
    with pytest.raises(ValueError, match="'bars' has 3; add photographs"):
        compose(few, num_classes=2, per_class=1)


def test_labels_domains_and_mask_of_a_square(composition: Composition, samples: list[Sample]) -> None:
    for sample, key, background in zip(samples, composition.keys, composition.backgrounds, strict=True):
        assert (sample.domain, sample.label, sample.background) == (*key[:2], background)
        assert sample.image.shape == (112, 112, 3) and sample.image.dtype == np.uint8
        rows, columns = np.flatnonzero(sample.mask.any(1)), np.flatnonzero(sample.mask.any(0))
        assert len(rows) == len(columns) == 48 and sample.mask.sum() == 48 * 48
    corners = np.array([np.argwhere(s.mask)[0] for s in samples])
    assert corners.min() <= 2 and corners.max() >= 62  # anywhere in 0..64


def test_the_digest_is_of_spec_and_contents(few: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(few, tmp_path / "moved"))
    first, same = (compose(root, num_classes=2, per_class=1).digest() for root in (few, moved))
    assert first == same != compose(few, num_classes=2, per_class=1, object_size=40).digest()
    assert first != compose(few, num_classes=2, per_class=1, seed=2).digest()
    Image.new("RGB", (50, 50), MAGENTA).save(moved / "plain" / "003.png")
    assert compose(moved, num_classes=2, per_class=1).digest() != first


def disc(height: int = 90, width: int = 80, radius: int = 25) -> np.ndarray:
    """(height, width, 4): a magenta disc, transparent black around it."""
    y, x = np.mgrid[:height, :width] - np.array([height // 3, width // 2])[:, None, None]
    image = np.zeros((height, width, 4), np.uint8)
    image[x**2 + y**2 <= radius**2] = (*MAGENTA, 255)
    return image


def test_alpha_is_the_mask(few: Path) -> None:
    for i in range(4):
        (few / "plain" / f"{i:03d}.{'png' if i % 2 else 'jpg'}").unlink()
        Image.fromarray(disc(radius=20 + i)).save(few / "plain" / f"{i}.png")
    composition = compose(few, num_classes=2, per_class=1)
    for sample in (sample for sample in composition if sample.label == 1):
        style = composition.spec.domains[sample.domain].style
        shown = styled(np.array(MAGENTA), list(LOOKS.values())[sample.domain], style)
        near = (abs(sample.image - shown.clip(0, 255)) <= composition.spec.noise).all(-1)
        assert np.array_equal(near, sample.mask)  # the mask is the object's pixels, all of them and no others
        assert 0.7 < sample.mask.sum() / 48**2 < 0.85  # a disc has pi/4 of its bounding box


def test_an_object_keeps_its_shape(tmp_path: Path) -> None:
    image = np.zeros((100, 100, 4), np.uint8)
    image[10:70, 30:60] = (*MAGENTA, 200)
    image[80:, 80:] = (0, 255, 0, 100)  # too faint to be a part of it
    Image.fromarray(image).save(tmp_path / "x.png")
    pixels, shape = cut_out(tmp_path / "x.png", 48)
    assert shape.shape == (48, 24) and shape.all() and (pixels == MAGENTA).all()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_any_other_image_is_the_square_in_its_middle(mode: str, tmp_path: Path) -> None:
    """An opaque RGBA image has no cut-out of its own."""
    image = Image.new("RGB", (100, 60), "black")
    image.paste("white", (20, 0, 80, 60))
    image.convert(mode).save(tmp_path / "x.png")
    pixels, shape = cut_out(tmp_path / "x.png", 48)
    assert pixels.shape == (48, 48, 3) and shape.all() and (pixels == 255).all()


def test_the_written_folder_has_the_truth_and_its_origin(few: Path, tmp_path: Path) -> None:
    composition = compose(few, num_classes=2, per_class=1, correlation=(1, 1, 0))
    folder = composition.write(tmp_path / "set")
    truth = true_masks(read_table(folder / "images"), (8, 8))
    assert truth is not None
    for i, sample in enumerate(composition):
        share = sample.mask.reshape(8, 14, 8, 14).mean((1, 3)).ravel()
        assert np.array_equal(truth[i], share >= 0.5) and truth[i].any()
    facts = json.loads((folder / "oracle.json").read_text())
    assert facts["digest"] == composition.digest() and facts["class_names"] == ["bars", "plain"]
    assert [d["correlation"] for d in facts["spec"]["domains"]] == [1.0, 1.0, 0.0, 0.5]
    assert facts["backgrounds"]["dusk/bars/0000.png"] == "grass"
    assert facts["backgrounds"]["jade/bars/0000.png"] == "brick"
    assert all((few / path).is_file() for path in facts["photographs"].values())
    assert facts["photographs"].keys() == facts["backgrounds"].keys()


def test_one_domain_of_several(image_folder: Path) -> None:
    composition = compose(image_folder, domain="field", num_classes=3, per_class=2)
    assert composition.spec.class_names == ("circle", "cross", "square")
    assert all(path.startswith("field/") for path in composition.photographs)
    with pytest.raises(ValueError, match="--domain must be one of clinic, field, studio, got none"):
        compose(image_folder, num_classes=3, per_class=2)
    with pytest.raises(ValueError, match="one of clinic, field, studio, got fild; did you mean 'field'"):
        compose(image_folder, domain="fild", num_classes=3, per_class=2)


def write_cub(root: Path) -> Path:
    """Two files of each species, which nobody decodes."""
    species = ["001.Herring_Gull", "002.Ivory_Gull", "003.Blue_Jay", "004.Green_Jay", "005.Raven"]
    paths = [f"{name}/{i}.jpg" for name in species for i in range(2)]
    for path in paths:
        (root / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "images" / path).write_text(path)
    labels = [str(1 + k // 2) for k in range(len(paths))]
    lists = {"images": paths, "image_class_labels": labels, "train_test_split": "1" * len(paths), "classes": species}
    for file, values in lists.items():
        (root / f"{file}.txt").write_text("".join(f"{i} {value}\n" for i, value in enumerate(values, 1)))
    return root


def test_cub_species_are_merged_by_pattern(tmp_path: Path) -> None:
    root = write_cub(tmp_path / "CUB_200_2011")
    composition = compose(root, classes=["Jay=*_Jay", "Gull=*Gull"], per_class=1)
    assert composition.spec.class_names == ("Gull", "Jay")
    for name, path in zip(composition.names, composition.photographs, strict=True):
        assert path.startswith("images/") and name.split("/")[1] in path
    several = compose(root, classes=["Jay=*_Blue_Jay|*Raven|003*", "Gull=*Gull"], per_class=1)
    jays = {path.split("/")[1] for path, key in zip(several.photographs, several.keys, strict=True) if key[1] == 1}
    assert jays == {"003.Blue_Jay", "005.Raven"}


@pytest.mark.parametrize(("change", "text"), [
    ({"per_class": 21}, r"needs 84 different photographs per class \(4 domains\), and 'bars' has 83"),
    ({"per_class": 30}, "'plain' has 83; use --per-class 20, or choose other --classes"),
    ({"classes": ["bars", "plian"]}, "no class is called 'plian'; did you mean 'plain'.*known: bars, checks"),
    ({"classes": ["bars", "bars"]}, "a unique name.*got 'bars'"),
    ({"classes": ["bars", "../x=plain"]}, "can name a folder, got '../x=plain'"),
    ({"classes": ["bars", "b=ba*"]}, "'bars' belongs to both 'bars' and 'b'"),
    ({"num_classes": 5}, r"2\.\.4 classes, with a background each, got 5 \(known: bars, checks, pillars, plain\)"),
    ({"domain": "photo"}, "it has no domains; leave out --domain, got photo"),
    ({"correlation": (0.9, 0.9, float("nan"))}, "got .*nan"),
    ({"object_size": 31}, r"--object must be 32\.\.84, got 31"),
])  # fmt: skip
def test_a_mistake_says_the_rule(photographs: Path, change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compose(photographs, **change)  # type: ignore[arg-type]


def test_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("x")
    for name, text in (("nowhere", "not exist. Expected class/image"), ("x.csv", "is no folder"), (".", "no folders")):
        with pytest.raises(ValueError, match=text):
            compose(tmp_path / name)


@pytest.mark.parametrize(("opaque", "text"), [
    (np.s_[40:42], "plain/000.png' is too thin: at 2 x 48 px it covers half of no patch; .*--object larger"),
    (np.s_[:0], "plain/000.png: it is transparent everywhere"),
])  # fmt: skip
def test_an_object_that_covers_no_patch_is_refused(few: Path, opaque: slice, text: str) -> None:
    for file in (few / "plain").iterdir():
        file.unlink()
    for i in range(4):
        image = np.full((60, 60, 4), (10 * i, 0, 0, 0), np.uint8)
        image[opaque, :, 3] = 255
        Image.fromarray(image).save(few / "plain" / f"{i:03d}.png")
    composition = compose(few, num_classes=2, per_class=1)
    with pytest.raises(ValueError, match=text):
        composition.sample(composition.photographs.index("plain/000.png"))


@pytest.mark.parametrize(("image_size", "side"), [(56, 32), (100, 32), (112, 32), (224, 32), (300, 43)])
def test_the_smallest_object_covers_a_patch_anywhere(few: Path, image_size: int, side: int) -> None:
    """On grids of 16 and 14 px patches, those of 224 px at most; equal offsets on both axes are the worst case."""
    composition = compose(few, num_classes=2, per_class=1, image_size=image_size, object_size=side)
    assert composition.sample(0).mask.shape == (image_size, image_size)
    with pytest.raises(ValueError, match=f"--object must be {side}"):
        compose(few, num_classes=2, per_class=1, image_size=image_size, object_size=side - 1)
    for start in range(image_size - side + 1):
        mask = np.zeros((image_size, image_size), dtype=bool)
        mask[start : start + side, start : start + side] = True
        for grid in (min(image_size // 16, 14), min(image_size // 14, 16)):
            assert half_covered(mask, (grid, grid)).any()
