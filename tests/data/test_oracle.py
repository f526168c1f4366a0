"""The oracle benchmark: the same pixels everywhere, C* alone decides, the shortcut holds in the sources only."""

import hashlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data.learned import columns, fit, is_shortcut
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from patchgen.data.oracle import SUITE, Domain, Oracle, OracleSpec, Sample, suite_folder, true_masks
from patchgen.data.oracle_draw import BACKDROPS, MOTIFS, Dice, layout
from patchgen.data.table import read_table

SMALL = replace(SUITE["oracle-shortcut"], per_class=2)
# first 16 digits of the sha256 over image and mask of four samples
GOLDEN = {
    "oracle-easy": "22da70106503a4df",
    "oracle-shortcut": "d581492c3daeb6ec",
    "oracle-turned": "1e1d1889ae3932de",
    "oracle-full": "716e9e9cb72a46d4",
    "oracle-tiny": "2146b0e7f512e1f7",
    "oracle-unknown": "545887416b7fc069",
    "oracle-local": "93ba6a8bd334c573",
}


def same(a: Sample, b: Sample) -> bool:
    numbers = (a.label, a.domain, a.background) == (b.label, b.domain, b.background)
    return numbers and np.array_equal(a.image, b.image) and np.array_equal(a.mask, b.mask)


def tiles(sample: Sample) -> np.ndarray:
    """(h,w,p,p,3)"""
    h, w = sample.mask.shape
    p = len(sample.image) // h
    return sample.image.reshape(h, p, w, p, 3).swapaxes(1, 2)


@pytest.mark.parametrize("name", SUITE)
def test_pixels_are_those_of_every_machine(name: str) -> None:
    oracle, sha = Oracle(SUITE[name]), hashlib.sha256()
    for i in (0, 777, 1300, len(oracle) - 1):
        sample = oracle.sample(i)
        sha.update(sample.image.tobytes() + sample.mask.tobytes())
    assert sha.hexdigest()[:16] == GOLDEN[name]


def test_random_access_equals_streaming() -> None:
    streamed = list(Oracle(SMALL))
    assert len(streamed) == len(Oracle(SMALL)) == 4 * 4 * 2
    again = Oracle(SMALL)
    assert all(same(again.sample(i), streamed[i]) for i in reversed(range(len(streamed))))
    assert not same(streamed[0], Oracle(replace(SMALL, seed=2)).sample(0))
    assert again.digest() != Oracle(replace(SMALL, noise=9)).digest()
    assert len({s.image.tobytes() for s in streamed}) == len(streamed)


@pytest.mark.parametrize("name", SUITE)
def test_backgrounds_follow_the_class_as_asked(name: str) -> None:
    spec = SUITE[name]
    facts = Oracle(spec).facts()
    seen = Counter((*file.split("/")[:2], kind) for file, kind in facts["backgrounds"].items())  # type: ignore[attr-defined]
    for domain in spec.domains:
        for label, class_name in enumerate(spec.class_names):
            kinds = list(BACKDROPS)[: spec.classes]
            own = kinds[label]
            counts = {kind: seen[domain.name, class_name, kind] for kind in kinds}
            assert sum(counts.values()) == spec.per_class
            assert abs(counts[own] - domain.correlation * spec.per_class) <= 0.5
            others = [n for kind, n in counts.items() if kind != own]
            if domain.turned:
                assert max(others) == counts[kinds[(label + 1) % spec.classes]] == sum(others)
            else:
                assert max(others) - min(others) <= 1
    unseen = next(d for d in spec.domains if d.name == spec.unseen)
    assert unseen.turned or unseen.correlation == 1 / spec.classes


@settings(max_examples=60, deadline=None)
@given(grid=st.integers(2, 9), share=st.floats(0, 1), groups=st.integers(1, 30), seed=st.integers(0, 99))
def test_any_allowed_layout_can_be_drawn(grid: int, share: float, groups: int, seed: int) -> None:
    patches = grid * grid
    size = 1 + int(share * (patches - 1)) if groups == 1 else 1 + int(share * (patches // 3 - 1))
    groups = min(groups, size)
    order = layout(Dice(seed), grid, size, groups)
    assert sorted(order) == list(range(patches))
    mask = np.isin(np.arange(patches), order[:size]).reshape(grid, grid)
    sizes = np.bincount(ndimage.label(mask)[0].ravel())[1:]  # of groups that are connected over edges
    assert len(sizes) == groups and sizes.sum() == size and sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("size", [1, 6, 12])
def test_the_predictive_set_lies_nearly_evenly(size: int) -> None:
    """Growth that does not favour the border has corners at 0.6 and, for 12 patches, a centre at 1.5 of the mean."""
    dice = Dice(5)
    count = np.bincount(np.concatenate([layout(dice, 6, size, 1)[:size] for _ in range(600)]), minlength=36)
    share = (count / count.mean()).reshape(6, 6)
    assert share[::5, ::5].mean() > 0.7 and share[2:4, 2:4].mean() < 1.4 and share.min() > 0.4


def texture_features(sample: Sample, mirrored: bool = False) -> np.ndarray:
    """Mean autocorrelation of the C* patches in black and white: blind to colour, polarity, phase and place."""
    gray = tiles(sample)[sample.mask].sum(-1, dtype=np.int64)
    gray = gray[:, :, ::-1] if mirrored else gray
    middle = (gray.min((1, 2), keepdims=True) + gray.max((1, 2), keepdims=True)) / 2
    ink = np.where(gray > middle, 1.0, -1.0)
    ink -= ink.mean((1, 2), keepdims=True)
    p = ink.shape[1]
    power = np.fft.irfft2(abs(np.fft.rfft2(ink, (2 * p, 2 * p))) ** 2, (2 * p, 2 * p))
    near = np.roll(power, p // 2, axis=2)[:, : p // 2, : p + 1]
    return (near / power[:, :1, :1]).mean(0).ravel()


def context_features(sample: Sample) -> np.ndarray:
    """Median colour, contrast and edges of the patches outside C*."""
    rest = tiles(sample)[~sample.mask].astype(np.float64)
    parts = [rest, abs(np.diff(rest, axis=1)), abs(np.diff(rest, axis=2))]
    return np.concatenate([np.median(part.mean((1, 2)), axis=0) for part in parts])


ONE_PATCH = {  # all motifs, by one patch
    f"{p} px": replace(SUITE["oracle-tiny"], patch_size=p, image_size=4 * p, classes=len(MOTIFS)) for p in (14, 16)
}


@pytest.mark.parametrize("spec", (SUITE | ONE_PATCH).values(), ids=[*SUITE, *ONE_PATCH])
def test_the_predictive_patches_decide_in_the_unseen_domain(spec: OracleSpec) -> None:
    chosen = list(Oracle(replace(spec, per_class=12)))
    label, unseen = columns(chosen)
    features = np.array([texture_features(s) for s in chosen])
    model = fit(features[~unseen], label[~unseen])
    assert model.score(features[unseen], label[unseen]) >= 0.99
    mirrored = np.array([texture_features(s, mirrored=True) for s in chosen])
    assert model.score(mirrored[unseen], label[unseen]) >= 0.99  # training flips images


def test_the_rest_is_a_shortcut_in_the_sources_and_chance_in_the_unseen_domain() -> None:
    assert is_shortcut(list(Oracle(replace(SUITE["oracle-shortcut"], per_class=28))), context_features)


def test_local_style_never_touches_the_predictive_patches() -> None:
    oracle = Oracle(replace(SUITE["oracle-local"], per_class=1))
    for i in range(len(oracle)):
        shown = [oracle.sample(i, domain=domain.name) for domain in oracle.spec.domains]
        shown.append(oracle.sample(i, background=3))
        for other in shown[1:]:
            assert np.array_equal(other.mask, shown[0].mask)
            assert np.array_equal(tiles(other)[other.mask], tiles(shown[0])[shown[0].mask])
        assert not np.array_equal(shown[0].image, shown[1].image)


def test_distractors_are_outside_and_as_many_as_asked() -> None:
    spec = replace(SMALL, noise=0, domains=tuple(replace(d, style=0) for d in SMALL.domains))
    with_them, without = Oracle(spec), Oracle(replace(spec, distractors=0))
    for i in range(0, len(with_them), 5):
        a, b = with_them.sample(i), without.sample(i)
        changed = (tiles(a) != tiles(b)).any((2, 3, 4))
        assert changed.sum() == spec.distractors and not (changed & a.mask).any()


def test_write_and_read_back(tmp_path: Path) -> None:
    oracle, done = Oracle(SMALL), []
    folder = oracle.write(tmp_path / "new" / "set", done.append)
    assert sum(done) == len(oracle) and [p.name for p in folder.parent.iterdir()] == ["set"]
    table = read_table(folder / "images")
    assert table.domains == tuple(d.name for d in SMALL.domains) and table.classes == SMALL.class_names
    native = true_masks(table, (6, 6))
    assert native is not None
    backgrounds = oracle.facts()["backgrounds"]
    for i, sample in enumerate(oracle):
        assert table.paths[i] == oracle.names[i] and (table.domain[i], table.label[i]) == (sample.domain, sample.label)
        assert np.array_equal(np.asarray(Image.open(table.file(i))), sample.image)
        assert np.array_equal(native[i], sample.mask.ravel())
        assert backgrounds[oracle.names[i]] == list(BACKDROPS)[sample.background]  # type: ignore[index]
        pixels = np.asarray(Image.open(folder / "masks" / table.paths[i]))
        assert pixels.shape == (84, 84) and set(np.unique(pixels)) == {0, 255}
    before = os.stat(folder / "oracle.json").st_mtime_ns
    assert oracle.write(folder) == folder and os.stat(folder / "oracle.json").st_mtime_ns == before
    for manifest in (tmp_path / "rows.csv", folder / "rows.csv"):
        table.to_csv(manifest)
        assert np.array_equal(true_masks(read_table(manifest), (6, 6)), native)  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [(3, 3), (2, 4), (7, 5), (16, 16)])
def test_masks_on_other_grids(grid: tuple[int, int], written: Path) -> None:
    found = true_masks(read_table(written), grid)
    assert found is not None and found.shape == (32, grid[0] * grid[1])
    for row, sample in list(zip(found, Oracle(SMALL), strict=True))[::7]:
        # every patch of 6 x 6 cut into h x w pieces, so that both grids meet exactly
        fine = np.kron(sample.mask, np.ones(grid)).reshape(grid[0], 6, grid[1], 6)
        assert np.array_equal(row, fine.mean((1, 3)).ravel() >= 0.5 - 1e-12)


def test_a_data_set_without_masks_has_none(image_folder: Path) -> None:
    assert true_masks(read_table(image_folder), (4, 4)) is None


def test_a_huge_mask_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Oracle(replace(SMALL, per_class=1)).write(tmp_path / "set")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match="cannot be read: .*write the data set again"):
        true_masks(read_table(folder / "images"), (6, 6))


def test_a_lost_mask_is_named(tmp_path: Path) -> None:
    folder = Oracle(replace(SMALL, per_class=1)).write(tmp_path / "set")
    (folder / "masks/dusk/bars/0000.png").unlink()
    with pytest.raises(ValueError, match="mask .*dusk/bars/0000.png. cannot be read: .*write the data set again"):
        true_masks(read_table(folder / "images"), (6, 6))
    with pytest.raises(ValueError, match="has lost 1 files.*dusk/bars/0000.png.*remove it"):
        Oracle(replace(SMALL, per_class=1)).write(folder)


def test_two_writers_of_the_same_set_agree(tmp_path: Path) -> None:
    oracle = Oracle(replace(SMALL, per_class=1))
    raced = oracle.write(tmp_path / "set", lambda _: (tmp_path / "set").exists() or oracle.write(tmp_path / "set"))
    assert [p.name for p in tmp_path.iterdir()] == ["set"] and len(read_table(raced / "images")) == 16


def test_other_data_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for place in ("set", "file"):
        with pytest.raises(ValueError, match="contains other data; name a new folder"):
            Oracle(SMALL).write(tmp_path / place)
    assert (tmp_path / "set" / "thesis.txt").read_text() == "years of work"


def test_suite_folder_is_made_once_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path))
    monkeypatch.setitem(SUITE, "oracle-small", replace(SMALL, per_class=1))
    images = suite_folder("oracle-small")
    assert images == tmp_path / "oracle" / f"oracle-small-{Oracle(SUITE['oracle-small']).digest()}" / "images"
    written = os.stat(images).st_ino
    assert len(read_table(images)) == 16 and suite_folder("oracle-small") == images
    assert os.stat(images).st_ino == written


# mistakes

ASKED = OracleSpec((Domain("a", 0.5, 0), Domain("b", 0.5, 1)), "b", predictive=3)


@pytest.mark.parametrize(("change", "text"), [
    ({"predictive": 37}, r"predictive must be 1\.\.36, got 37"),
    ({"image_size": 85}, "multiple of patch_size 14, got 85"),
    ({"patch_size": 0}, r"patch_size must be 14\.\.42, got 0"),
    ({"objects": 4}, r"objects must be 1\.\.3, got 4"),
    ({"objects": 2, "predictive": 13}, r"objects must be 1\.\.1, got 2"),
    ({"local": True, "predictive": 36}, r"predictive must be 1\.\.35, got 36"),
    ({"unseen": "aa"}, "unseen must be one of a, b, got 'aa'"),
    ({"domains": (Domain("b", 0.5, 1), Domain("B", 0.5, 1))}, "names must differ"),
    ({"domains": (Domain("b", 0.5, 1), Domain("../x", 0.5, 1))}, "name folders .*'../x'"),
    ({"domains": (Domain("b", float("nan"), 1), Domain("c", 0.5, 1))}, r"correlation of b must be 0\.\.1, got nan"),
])  # fmt: skip
def test_a_wrong_spec_says_the_rule(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(ASKED, **change)  # type: ignore[arg-type]


def test_an_unknown_set_is_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean 'oracle-easy'"):
        suite_folder("oracle-esay")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Oracle(SMALL).write(tmp_path_factory.mktemp("oracle") / "set") / "images"
