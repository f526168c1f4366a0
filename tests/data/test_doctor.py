"""The doctor finds planted faults, names the file and the fix, and never raises."""

import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchgen.data.doctor as doctor
from patchgen.data.doctor import DISTANCE, Check, examine, examine_machine, similar_pairs, worst


def paint(root: Path, name: str, seed: int, size: tuple[int, int] = (12, 8)) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / name)
    return root / name


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    names = [f"{d}/{c}/{i}.png" for d in ("a", "b") for c in ("cat", "dog") for i in range(5)]
    for seed, name in enumerate(names):
        paint(tmp_path / "set", name, seed)
    return tmp_path / "set"


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    assert all(bool(check.fix) == (check.status != "pass") and check.detail for check in checks)
    return {check.name: check for check in checks}


def test_healthy_set_passes(healthy: Path) -> None:
    calls: list[tuple[int, int]] = []
    checks = examine(healthy, progress=lambda done, total: calls.append((done, total)))
    found = by_name(checks)
    assert worst(checks) == "pass" == worst([]) and worst([*checks, Check("x", "warn", "")]) == "warn"
    assert found["layout"].detail == "20 images, 2 domains (a, b), 2 classes (cat, dog)"
    assert "a 12x8 (8-12), b 12x8 (8-12)" in found["image sizes"].detail
    assert calls == [(i, 20) for i in range(1, 21)]


def test_bad_layout_is_a_failed_check(tmp_path: Path) -> None:
    (check,) = examine(tmp_path / "nowhere")
    assert (check.name, check.status) == ("layout", "fail") and "No such data" in check.detail and check.fix
    (check,) = examine(tmp_path, benchmark="pasc")
    assert check.status == "fail" and "did you mean 'pacs'" in check.detail


def test_unreadable_images_are_named(healthy: Path) -> None:
    whole = (healthy / "a/cat/0.png").read_bytes()
    (healthy / "a/cat/0.png").write_bytes(whole[: len(whole) // 2])
    (healthy / "a/cat/1.png").write_bytes(b"not an image")
    for i in (3, 4):
        (healthy / f"b/dog/{i}.png").write_bytes(b"")
    check = by_name(examine(healthy))["readable images"]
    assert check.status == "fail" and check.detail.startswith("4 of 20") and check.detail.endswith(", and 1 more")
    assert all(name in check.detail for name in ("a/cat/0.png", "a/cat/1.png", "b/dog/3.png"))
    fast = by_name(examine(healthy, decode=False))
    assert fast["readable images"].detail.startswith("2 of 20: b/dog/3.png (empty file)")
    assert "image sizes" not in fast


@pytest.mark.parametrize(("copy", "kind", "status"), [
    ("a/cat/9.png", "within a domain", "warn"),
    ("b/cat/9.png", "across domains", "warn"),
    ("a/dog/9.png", "different labels", "fail"),
])  # fmt: skip
@pytest.mark.parametrize("decode", [True, False])
def test_duplicates(healthy: Path, copy: str, kind: str, status: str, decode: bool) -> None:
    shutil.copy(healthy / "a/cat/0.png", healthy / copy)
    found = by_name(examine(healthy, decode=decode))
    check = found[f"duplicates, {kind}"]
    assert check.status == status and f"a/cat/0.png = {copy}" in check.detail and check.detail.startswith("1 pictures")
    # a copy in another domain with the same label touches neither of the other two checks
    others = {name: c.status for name, c in found.items() if name.startswith("duplicates") and c is not check}
    wanted = {"within a domain": "pass", "across domains": "pass", "different labels": "pass"}
    if kind == "different labels":
        wanted["within a domain"] = "warn"  # a/cat and a/dog share the domain
    assert others == {f"duplicates, {k}": v for k, v in wanted.items() if k != kind}


def test_faults_of_names_and_sizes(healthy: Path) -> None:
    paint(healthy, "b/fox/1.png", 100)
    paint(healthy, "b/Dog/1.png", 101)
    paint(healthy, "a/cat/dot.png", 102, size=(1, 1))
    for name in ("scan.DCM", "drawing.psd", "notes.txt"):
        (healthy / "b/dog" / name).write_text("hello")
    found = by_name(examine(healthy))
    for name, detail in {
        "missing classes": "a lacks Dog, fox",
        "tiny classes": "b/Dog (1), b/fox (1)",
        "class spelling": "differ only in case or Unicode form: Dog and dog",
        "tiny images": "1 with a side below 8 pixels: a/cat/dot.png (1x1)",
        "files not read": "3 files skipped, no image by the ending: 1 .dcm, 1 .psd, 1 .txt (such as b/dog/drawing.psd)",
    }.items():
        assert (found[name].status, found[name].detail) == ("warn", detail)
    for seed, name in enumerate(("caf\u00e9", "cafe\u0301")):
        paint(healthy, f"a/{name}/1.png", 103 + seed)
    detail = by_name(examine(healthy))["class spelling"].detail
    assert "caf\u00e9" in detail and "Dog and dog" in detail


def examine_manifest(root: Path, column: str, value: Callable[[int, Path], str]) -> dict[str, Check]:
    """Checks of a manifest of the set, one column of which has the value of each (number, path)."""
    lines = []
    for i, path in enumerate(file.relative_to(root) for file in sorted(root.rglob("*.png"))):
        cells = {"path": str(path), "domain": path.parts[0], "label": path.parts[1]}
        lines.append(",".join((cells | {column: value(i, path)}).values()))
    (root / "m.csv").write_text("\n".join(["path,domain,label" + ",group" * (column == "group"), *lines]))
    return by_name(examine(root / "m.csv"))


def test_rows_without_a_label_are_counted(healthy: Path) -> None:
    check = examine_manifest(healthy, "label", lambda i, path: "" if i in (0, 1, 15) else path.parts[1])["empty labels"]
    assert check.status == "warn" and check.detail == "3 of 20 rows: a 2, b 1"
    assert "empty labels" not in by_name(examine(healthy))


def test_sixteen_bit_grays(healthy: Path) -> None:
    def save(name: str, most: int) -> None:
        Image.fromarray(np.linspace(0, most, 96).astype(np.uint16).reshape(8, 12)).save(healthy / name)

    save("a/cat/0.png", 4095)
    save("b/cat/0.png", 4000)
    check = by_name(examine(healthy))["16-bit grays"]
    assert (check.status, check.detail) == ("pass", "2 use 12 bits")
    save("b/dog/0.png", 65535)
    check = by_name(examine(healthy))["16-bit grays"]
    assert (check.status, check.detail) == ("warn", "2 use 12 bits, 1 use 16 bits")


def test_uneven_resolution_warns(healthy: Path) -> None:
    for seed, (c, i) in enumerate((c, i) for c in ("cat", "dog") for i in range(5)):
        paint(healthy, f"b/{c}/{i}.png", 50 + seed, size=(24, 16))
    check = by_name(examine(healthy))["image sizes"]
    assert check.status == "warn" and "a 12x8 (8-12), b 24x16 (16-24)" in check.detail


def test_groups_on_both_sides(healthy: Path) -> None:
    torn = examine_manifest(healthy, "group", lambda i, path: "p")["groups"]  # one patient a domain
    assert torn.status == "warn" and "2 of 2 groups" in torn.detail and "--split group" in torn.fix
    assert examine_manifest(healthy, "group", lambda i, path: f"p{i}")["groups"].status == "pass"


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_groups_in_several_domains(healthy: Path, shared: int) -> None:
    """Image i of either domain is patient i's; those from `shared` on are told apart by the site's name."""
    checks = examine_manifest(healthy, "group", lambda i, p: p.parts[0] * (int(p.stem) >= shared) + f"p{p.stem}")
    found = checks.get("groups across domains")
    assert (found is not None) == (shared > 0)
    if found is not None:
        assert found.status == "warn" and f"{shared} of {10 - shared} groups" in found.detail
        assert "such as p0 (a, b)" in found.detail and "merge these sites into one domain" in found.fix


def test_benchmark_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(["photo/dog/1.png", "sketch/dog/1.png", "sketch/horse/1.png"]):
        paint(tmp_path / "PACS", name, seed)
    found = by_name(examine(tmp_path / "PACS"))
    assert found["counts"].status == "warn"
    assert "photo 1 (-1,669), sketch 2 (-3,927)" in found["counts"].detail
    assert found["domains"].detail == "pacs without art_painting, cartoon"
    entry = doctor.BENCHMARKS["pacs"]
    counts = {**entry.counts, "toy": {"photo": 1, "sketch": 2}}
    monkeypatch.setitem(doctor.BENCHMARKS, "pacs", type(entry)(**{**vars(entry), "counts": counts}))
    found = by_name(examine(tmp_path / "PACS"))
    assert found["counts"].status == "pass" and "version toy" in found["counts"].detail


def test_cache_space(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "not" / "yet"))
    usage = shutil.disk_usage(tmp_path)
    seen: list[Path] = []

    def disk(free: int) -> Check:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: (seen.append(place), usage._replace(free=free))[1])
        return by_name(examine(healthy))["cache space"]

    needed = 20 * 224 * 224 * 3
    assert disk(needed).status == "warn" and disk(needed + 1).status == "pass"
    assert set(seen) == {tmp_path}  # the nearest folder that exists


def test_every_extra_is_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    modules = {"umap-learn": "umap", "openslide-python": "openslide", "mlflow-skinny": "mlflow"}
    for extra, packages in project["optional-dependencies"].items():
        names = {re.split(r"[>\[]", package)[0] for package in packages}
        found = {modules.get(name, name.replace("-", "_")) for name in names} & {*doctor.EXTRAS}
        assert found or extra in ("all", "dev", "docs"), extra


def test_broken_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision").mkdir()
    error = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(error)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", sys)  # it would look for torchvision, and remember it
    check = by_name(examine_machine())["torchvision"]
    assert check.status == "warn" and check.fix == "pip uninstall torchvision"
    assert "only timm needs it" in check.detail and "nms does not exist" in check.detail and "\n" not in check.detail


def test_pictures_that_look_alike_across_domains_are_warned_of(healthy: Path) -> None:
    """A copy that was scaled, brightened and compressed is another file, and the same picture."""
    assert by_name(examine(healthy))["near-duplicates across domains"].status == "pass"
    rng = np.random.default_rng(7)
    scene = Image.fromarray(rng.integers(0, 200, (9, 9, 3), dtype=np.uint8)).resize((90, 80), Image.Resampling.BICUBIC)
    scene.save(healthy / "a/cat/scene.png")
    scene.resize((45, 40)).point(lambda value: min(255, value + 20)).save(healthy / "b/dog/again.jpg", quality=70)
    Image.new("RGB", (40, 40), "white").save(healthy / "a/cat/blank.png")  # without structure: nothing to compare
    Image.new("RGB", (41, 41), "white").save(healthy / "b/cat/blank.png")
    found = by_name(examine(healthy))["near-duplicates across domains"]
    assert found.status == "warn" and "the unseen domain is not unseen" in found.fix
    assert found.detail == "1 pairs look alike: a/cat/scene.png ~ b/dog/again.jpg"
    assert "near-duplicates across domains" not in by_name(examine(healthy, decode=False))


# Perceptual hashes: every near pair is found, against a slow comparison of all


def test_the_pairs_are_those_of_a_slow_comparison() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, (300, 2), dtype=np.uint64)
    for row, flips in enumerate(range(0, 20), 200):  # copies of the first rows, with 0 to 19 bits flipped
        bits = np.unpackbits(hashes[row - 200].view(np.uint8))
        bits[rng.choice(128, flips, replace=False)] ^= 1
        hashes[row] = np.packbits(bits).view(np.uint64)
    domain = rng.integers(0, 3, 300)
    apart = np.unpackbits((hashes[:, None] ^ hashes[None]).view(np.uint8), axis=2).sum(2)
    slow = [(i, j) for i in range(300) for j in range(i + 1, 300) if apart[i, j] <= DISTANCE and domain[i] != domain[j]]
    assert similar_pairs(hashes, domain) == slow and 3 < len(slow) < 9


def test_processes_and_threads_find_the_same(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*sorted(image_folder.rglob("*.png"))[:20], tmp_path / "broken.png"]
    files[-1].write_text("no image")
    threads = list(doctor.inspect_files(files, True, None))
    monkeypatch.setattr(doctor, "MANY", 1)
    monkeypatch.setattr(doctor, "available_cores", lambda: 2)
    for one, other in zip(threads, doctor.inspect_files(files, True, None), strict=True):
        assert (one.digest, one.size, one.error) == (other.digest, other.size, other.error)
        assert (one.look is None) == (other.look is None) and np.array_equal(one.look, other.look)
    assert threads[-1].error
