"""The commands of docs/use/slides.md and histology.md run, on small slides under the names that the pages use."""

import csv
import re
import shlex
import shutil
from glob import glob
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.commands.options import EngineOptions

for name in ("openslide", "shapely", "torchstain"):
    pytest.importorskip(name)

from PIL import Image  # noqa: E402

from patchgen.slides import heatmap  # noqa: E402

from .cohort import MPP, TILE, draw  # noqa: E402

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"
CHEAP = shlex.split("--backbone tiny --image-size 28 --steps 2 --eval-every 1 --batch-per-domain 2 --val-images 2")


def commands(page: str) -> list[str]:
    """The lines behind `patchgen`; data sets that a machine may lack are left out."""
    blocks = re.findall(
        r"^```bash\n(.*?)^```", next(DOCS.rglob(page)).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("patchgen ")]
    return [" ".join(shlex.split(line, comments=True)[1:]) for line in lines if "$PATCHGEN_DATA" not in line]


@pytest.fixture(scope="module")
def ground(cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages speak of; `tiles.csv` has a third site."""
    from patchgen.slides.heatmap import write_pyramid

    home = tmp_path_factory.mktemp("pages")
    for slide in sorted((cohort / "slides").glob("*/*.tif")):
        (home / "slides" / slide.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(slide, home / "slides" / slide.parent.name / f"{slide.stem}.ndpi")
        shutil.copy(slide, home / "biopsy.svs")
    shutil.copytree(cohort / "annotations", home / "annotations")
    write_pyramid(home / "scan.tif", draw("site_a", 3))
    (home / "slides.csv").write_text("slide,label,domain,group\na1.ndpi,normal,north,p1\nb1,tumour,south,p2\n")
    annotations = ["--annotations", str(home / "annotations")]
    assert (
        main(["slide", "tiles", str(home / "slides"), *annotations, "--out", f"{home}/tiles", "--tile", str(TILE)]) == 0
    )
    with (home / "tiles" / "manifest.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    lines = [f"tiles/{row['path']},{'site_c' if i % 3 == 0 else row['domain']},{row['label']},{i % 9}-{row['group']}"
             for i, row in enumerate(rows)]  # fmt: skip
    (home / "tiles.csv").write_text("path,domain,label,group\n" + "\n".join(lines) + "\n")
    shutil.copytree(home / "tiles" / "images" / "site_a", home / "new-tiles")
    words = ["fit", f"{home}/tiles/manifest.csv", "--out", f"{home}/MODEL", "--runs", f"{home}/runs", "--no-expect"]
    assert main([*words, *CHEAP, "--method", "lp-ln"]) == 0
    return home


def test_there_is_something_to_run() -> None:
    assert sum(line.startswith("slide tiles") for line in commands("slides.md")) >= 4
    assert sum("--stain macenko" in line for line in commands("histology.md")) >= 1


@pytest.mark.parametrize("line", [*commands("slides.md"), *commands("histology.md")])
def test_command_runs(line: str, ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of the small slides' size, trainings of two steps, and in this process instead of on an engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(EngineOptions, "alone", True)
    monkeypatch.setattr(heatmap, "overlay", lambda small, *_: Image.fromarray(small))  # a drawing takes longest
    for there in ground.iterdir():
        if there.name not in ("maps", "runs"):
            (tmp_path / there.name).symlink_to(there)
    words = [found for word in line.split() for found in (sorted(glob(word)) or [word])]
    if words[0] == "fit" or words[0] == "train":
        out = words.index("--out") + 1 if "--out" in words else None
        words = [*words, *CHEAP, *(["--no-expect", "--runs", "r"] if out else [])]
        if out:
            words[out] = "fitted"
    elif words[0] == "slide":
        if words[1] == "tiles":
            words[words.index("--out") + 1] = "cut"
        for option, value in (("--tile", TILE), ("--mpp", MPP)):
            if option in words:
                words[words.index(option) + 1] = str(value)
        if words[1] == "tiles" and "--tile" not in words:
            words += ["--tile", str(TILE)]
    assert main(words) == 0, words
