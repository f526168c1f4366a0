"""patchgen theory [--run RUN] [--out DIR]: the paper's inequalities where their premises hold, and on a run."""

from patchgen.commands import check_folder, print_table
from patchgen.common.text import json_text


def theory(
    run: str | None = None,
    sizes: tuple[int, ...] = (1, 4, 12, 36),
    images: int = 400,
    seed: int = 1,
    backbone: str | None = None,
    allow_download: bool = False,
    json: bool = False,
    out: str | None = None,
) -> None:
    """Measure every inequality of the paper's theory on images whose predictive patches are known.

    Args:
        run: A PatchGen run on data with true masks: the same rows there, where premises are only approximate.
        sizes: Numbers s of predictive patches, of 36.
        images: Images for fitting, and as many again for measuring, at each size.
        seed: Seed of images, masks and random signs.
        backbone: Where the run's backbone is, if it is not where the run says.
        allow_download: Let the run's own settings choose which backbone is downloaded.
        json: Print JSON instead of tables.
        out: Folder for theory.json, theory.md and the figure (PNG and SVG).
    """
    folder = None if out is None else check_folder(out)
    from patchgen.common.progress import Progress
    from patchgen.theory.measure import check_arguments, measure_oracle, measure_run
    from patchgen.theory.report import HEADER, SCOPE, tables, write_theory

    total, trained = check_arguments(sizes, images, seed), None
    if run:  # first, so that a wrong folder fails early
        with Progress("theory, run", 2 * images) as bar:
            trained = measure_run(run, images, bar.advance, backbone=backbone, allow_download=allow_download)
    with Progress("theory", total) as bar:
        oracle = measure_oracle(sizes, images, seed, bar.advance)
        bar.say("measured")
    settings = {"sizes": list(sizes), "images": images, "seed": seed}
    measured = {"settings": settings, "scope": SCOPE, **oracle, "run": trained}
    if folder is not None:
        write_theory(measured, folder)
    if json:
        print(json_text(measured))
        return
    for title, rows in tables(measured).items():
        print(f"\n{title}")
        print_table(HEADER, [row[:-1] for row in rows])
    print(f"\n{SCOPE}")
    if out is not None:
        print(out)


COMMAND = theory
