"""Oracle images on which the paper's premises hold by construction, and masks with a known error.

The `local` set keeps a domain's style and noise off C*. Coupled domains show the same draws, so that the empirical law
of (Phi_C, Y) is exactly the same there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from patchgen.data.oracle import SUITE, Oracle, OracleSpec, Sample

LOCAL = SUITE["oracle-local"]
PATCHES = LOCAL.grid**2  # P
BOUND = 1.0  # B: a patch's representation is a vector of probabilities
ENCODER_SIZES = {12: 7, PATCHES: 2}  # |C*| -> images per domain and class that the encoder is fitted on
NOISE = 0.01  # epsilon of the noisy mask
Encoder = Callable[[np.ndarray], np.ndarray]  # pixels of patches (M,p,p,3) -> (M,d)


@dataclass(frozen=True, eq=False)
class Patches:
    """Patch representations of images whose predictive patches are known."""

    z: np.ndarray  # (N,P,d)
    truth: np.ndarray  # (N,P) bool: C*
    label: np.ndarray  # (N,)
    domain: np.ndarray  # (N,) into domains
    domains: tuple[str, ...]

    def rows(self, name: str) -> np.ndarray:
        """(N,) bool: the images of a domain."""
        return self.domain == self.domains.index(name)


# The data


def local_spec(size: int, per_class: int, seed: int) -> OracleSpec:
    """`oracle-local` with |C*| = size; with size = P there is no context, so all domains must be equal."""
    if not 1 <= size <= PATCHES:
        raise ValueError(f"sizes must be 1..{PATCHES} patches, got {size}")
    spec = replace(
        LOCAL, predictive=size, per_class=per_class, seed=seed, local=size < PATCHES,
        objects=min(LOCAL.objects, size) if 3 * size <= PATCHES else 1,
        distractors=min(LOCAL.distractors, PATCHES - size),
    )  # fmt: skip
    if size < PATCHES:
        return spec
    plain = tuple(replace(domain, style=0.0, correlation=1 / LOCAL.classes) for domain in LOCAL.domains)
    return replace(spec, noise=0, domains=plain)


def draw(spec: OracleSpec, encoder: Encoder, couple: bool = False) -> Patches:
    """The images of a spec, each drawn by itself, or coupled over the domains."""
    oracle = Oracle(spec)
    samples = coupled(oracle) if couple else (oracle.sample(i) for i in range(len(oracle)))
    columns = [(encoder(tiles(sample)), sample.mask.ravel(), sample.label, sample.domain) for sample in samples]
    z, truth, label, domain = map(np.array, zip(*columns, strict=True))
    return Patches(z, truth, label, domain, tuple(d.name for d in spec.domains))


def coupled(oracle: Oracle) -> Iterator[Sample]:
    """The first domain's draws shown in every domain's style, before backgrounds that follow that domain's law."""
    spec = oracle.spec
    block = spec.classes * spec.per_class  # images of a domain
    for d, domain in enumerate(spec.domains):
        for i in range(block):
            # where C* fills the image the background is a tint of C* itself and must be the same everywhere
            source = i if spec.predictive == spec.grid**2 else d * block + i
            yield oracle.sample(i, domain=domain.name, background=oracle.backgrounds[source])


def tiles(sample: Sample) -> np.ndarray:
    """The patches of an image: (P,p,p,3)."""
    grid = len(sample.mask)
    side = len(sample.image) // grid
    return sample.image.reshape(grid, side, grid, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)


# The patch-local encoder


def describe(patches: np.ndarray) -> np.ndarray:
    """Texture (autocorrelation in black and white), colour, contrast and edges of each patch: (M,p,p,3) -> (M,F)."""
    pixels = patches.astype(np.float64) / 255
    gray = pixels.sum(-1)
    middle = (gray.min((1, 2), keepdims=True) + gray.max((1, 2), keepdims=True)) / 2
    ink = np.where(gray > middle, 1.0, -1.0)
    ink -= ink.mean((1, 2), keepdims=True)
    side = ink.shape[1]
    power = np.fft.irfft2(abs(np.fft.rfft2(ink, (2 * side, 2 * side))) ** 2, (2 * side, 2 * side))
    near = np.roll(power, side // 2, axis=2)[:, : side // 2, : side + 1] / np.maximum(power[:, :1, :1], 1e-9)
    colour, contrast = pixels.mean((1, 2)), pixels.std((1, 2))
    edges = [abs(np.diff(pixels, axis=axis)).mean((1, 2)) for axis in (1, 2)]
    parts = [near.reshape(len(patches), -1), colour, contrast, *edges, colour**2, colour * contrast]
    return np.concatenate(parts, axis=1)


def fit_encoder(seed: int) -> Encoder:
    """z_p: the probabilities (so |z_p| <= 1 = B) of motifs and backgrounds for one patch, fitted on other draws."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, names = [], []
    for size, per_class in ENCODER_SIZES.items():
        for sample in Oracle(local_spec(size, per_class, seed)):
            features.append(describe(tiles(sample)))
            names.append(np.where(sample.mask.ravel(), sample.label, LOCAL.classes + sample.background))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, tol=1e-3))
    model.fit(np.concatenate(features), np.concatenate(names))
    return lambda patches: model.predict_proba(describe(patches))


# Masks with a known error


def noisy_mask(truth: np.ndarray, seed: int, epsilon: float = NOISE) -> np.ndarray:
    """Every entry moves inwards by a uniform amount of mean epsilon: m in [0,1], |m - m*|_1 <= 2 epsilon P."""
    move = np.random.default_rng([seed, 12]).uniform(0, 2 * epsilon, truth.shape)
    return np.where(truth, 1 - move, move)


def shifted_mask(truth: np.ndarray) -> np.ndarray:
    """C* one patch to the right, round the edge: (N,P) float."""
    side = int(round(truth.shape[1] ** 0.5))
    return np.roll(truth.reshape(-1, side, side), 1, axis=2).reshape(truth.shape).astype(float)
